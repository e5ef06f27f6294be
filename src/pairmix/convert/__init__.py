"""Dense layers of a model to SPM, in place, and back."""

from pairmix.convert.model import convert_, restore_
from pairmix.convert.report import Conversion, Left, Replaced

__all__ = ["Conversion", "Left", "Replaced", "convert_", "restore_"]
