"""The defaults of all settings, as names to import and override. `sft_nb config` shows them."""
from sft_nb.config.settings import defaults as _defaults

globals().update(_defaults())
