"""The names of ``lab`` under the one that it had."""

from lab import *  # noqa: F403
