"""Steer: vectors whose effect on the vocabulary is bounded, measured and visible."""

from lmhead.steer.apply import steer
from lmhead.steer.audit import Audit, audit
from lmhead.steer.certificate import Certificate, alpha_for, certify
from lmhead.steer.control import load_control_vector, load_vectors, save_control_vector
from lmhead.steer.guard import Guarded, GuardLog, guard
from lmhead.steer.strength import fitted
from lmhead.steer.vector import HEAD, Card, SteeringVector, SteeringWarning

__all__ = [
    "HEAD",
    "Audit",
    "Card",
    "Certificate",
    "GuardLog",
    "Guarded",
    "SteeringVector",
    "SteeringWarning",
    "alpha_for",
    "audit",
    "certify",
    "fitted",
    "guard",
    "load_control_vector",
    "load_vectors",
    "save_control_vector",
    "steer",
]
