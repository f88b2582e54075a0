"""A recipe's configuration: strict TOML and dotted overrides read into attrs classes.

The class that a recipe defines is the whole schema. Its defaults come first, then one TOML file,
then ``KEY=VALUE`` from the command line, merged key by key: ``model.dim=512`` keeps the other keys
of the default ``model``. Nothing is coerced but ``1`` to ``1.0`` and text to a path, and nothing is
skipped: a run that trains for a day on a mistyped key costs more than a refusal, so every mistake
is named at once, before anything else has started.
"""

from forgekit.config.command_line import load_config
from forgekit.config.schema import key
from forgekit.config.strict import ConfigError, structure, to_dict

__all__ = ["ConfigError", "key", "load_config", "structure", "to_dict"]
