"""Steer: vectors whose effect on the vocabulary is bounded, measured and visible."""

from lmhead.steer.bound.auditing import Audit, audit
from lmhead.steer.bound.certificate import Certificate, alpha_for, certify
from lmhead.steer.bound.guarding import Guard, Guarded, GuardLog, guard, steering_for
from lmhead.steer.bound.steering import steer_model
from lmhead.steer.bound.strength import fitted
from lmhead.steer.control import load_control_vector, load_vectors, save_control_vector
from lmhead.steer.judge.detector import Detection, detect
from lmhead.steer.judge.evaluation import evaluate
from lmhead.steer.learn.reading import read_data
from lmhead.steer.learn.training import train
from lmhead.steer.vector import HEAD, Card, SteeringVector, SteeringWarning

__all__ = [
    "HEAD",
    "Audit",
    "Card",
    "Certificate",
    "Detection",
    "Guard",
    "GuardLog",
    "Guarded",
    "SteeringVector",
    "SteeringWarning",
    "alpha_for",
    "audit",
    "certify",
    "detect",
    "evaluate",
    "fitted",
    "guard",
    "load_control_vector",
    "load_vectors",
    "read_data",
    "save_control_vector",
    "steer_model",
    "steering_for",
    "train",
]
