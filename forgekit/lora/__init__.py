"""Adapters: added, merged, begun again, and read and written in peft's layout."""

from forgekit.lora.adapters import (
    add_lora as add_lora,
    merge_lora as merge_lora,
    relora as relora,
    reset_magnitudes as reset_magnitudes,
    unmerge_lora as unmerge_lora,
)
from forgekit.lora.peft_files import (
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
