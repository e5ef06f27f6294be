"""SPM layers that are close to given matrices."""

from pairmix.fit.layer import Fitted, fit, fit_

__all__ = ["Fitted", "fit", "fit_"]
