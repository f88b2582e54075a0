"""Optional packages, imported inside the functions that need them."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package, or say how to install it.

    Args:
        module: The module to import, for example ``"pyarrow.parquet"``.
        extra: The extra of forgekit that installs the package.

    Returns:
        The module.

    Raises:
        ImportError: If the package is not installed.

    Examples:
        >>> require("json", extra="text").dumps([1])
        '[1]'
        >>> require("not_there", extra="text")
        Traceback (most recent call last):
        ImportError: not_there is not installed. Install it with: pip install "forgekit[text]"
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is installed, but one of its own dependencies is not
        raise ImportError(
            f'{package} is not installed. Install it with: pip install "forgekit[{extra}]"',
            name=package,
        ) from None
