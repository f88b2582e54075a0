"""Measured and sampled: the average in place of the weights, samples on disk."""

from forgekit.evaluation.averaged import averaged as averaged
from forgekit.evaluation.generate import write_sample as write_sample
