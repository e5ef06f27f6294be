"""Grids of `bench init` that take a moment."""

from pairmix_lab.bench.init import Config
from pairmix_lab.experiments import teacher
from pairmix_lab.experiments.experiment import StartCase

TINY = {"steps": 3, "batch": 8}
NEAR = StartCase("near", lrs=(1e-3, 1e-2), settings=TINY, widths=(8,))
TEXT = StartCase("text", lrs=(1e-3,), settings={**TINY, "length": 8, "stages": None}, widths=(8, 12))


def grid(*cases, **options):
    return Config(cases=cases or ((teacher.EXPERIMENT, NEAR),), **{"seeds": (0, 1), **options})
