"""The experiments, one file each, and the one list of them.

A new experiment is a new file and a line here: commands, benchmarks, tables and the page find it in the list.
"""

from __future__ import annotations

from pairmix_lab.experiments import adapters, agnews, gpt, shakespeare, teacher
from pairmix_lab.experiments.experiment import Experiment

EXPERIMENTS: list[Experiment] = [
    teacher.EXPERIMENT,
    agnews.EXPERIMENT,
    shakespeare.EXPERIMENT,
    gpt.EXPERIMENT,
    adapters.EXPERIMENT,
]
