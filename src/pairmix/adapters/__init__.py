"""Orthogonal fine-tuning: rotations near the identity before or after the frozen layers of a trained model.

    y = W (S R x) + b        or        y = S R (W x) + b        R = B_L ... B_1

R is a chain of L stages of 2x2 rotations, S an optional scale of each coordinate. Neither forward nor backward builds a
matrix of R: `n // 2` numbers a stage are learned, and O(n L) is computed for every row.
"""

from pairmix.adapters.files import load, save
from pairmix.adapters.layer import Adapted, Rotations
from pairmix.adapters.merging import merge_, unmerge_
from pairmix.adapters.model import Added, add, names, off, parameters, remove, use

__all__ = [
    "Adapted",
    "Added",
    "Rotations",
    "add",
    "load",
    "merge_",
    "names",
    "off",
    "parameters",
    "remove",
    "save",
    "unmerge_",
    "use",
]
