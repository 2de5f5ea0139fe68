"""Providers of signals that cost a forward or a backward: hooks of a model, and helpers that a training loop calls."""

from .curvature import gauss_newton_bartlett as gauss_newton_bartlett
from .curvature import hutchinson as hutchinson
from .input_grams import InputGrams as InputGrams
from .input_grams import watch_inputs as watch_inputs
from .logits import MaxLogits as MaxLogits
from .logits import watch_logits as watch_logits
