"""Steer: vectors whose effect on the vocabulary is bounded, measured and visible."""

from lmhead.steer.bound.auditing import Audit, audit
from lmhead.steer.bound.certificate import Certificate, alpha_for, certify
from lmhead.steer.bound.guarding import Guarded, GuardLog, guard
from lmhead.steer.bound.steering import steer
from lmhead.steer.bound.strength import fitted
from lmhead.steer.control import load_control_vector, load_vectors, save_control_vector
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
