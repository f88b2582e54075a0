"""Published weights: directories of transformers, read into any layout and written from it."""

from forgekit.huggingface.load import (
    huggingface_spec as huggingface_spec,
    load_huggingface as load_huggingface,
)
from forgekit.huggingface.save import save_huggingface as save_huggingface
from forgekit.huggingface.new_tokens import read_base as read_base
from forgekit.huggingface.export import (
    check_new_directory as check_new_directory,
    export_tuned as export_tuned,
)
from forgekit.huggingface.transformers_models import transformers_model as transformers_model
