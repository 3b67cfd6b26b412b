"""The defaults, as names to import and override. They stand in `sft_nb/config/settings.py`; `sft_nb config` shows them."""
from sft_nb.config.settings import defaults as _defaults

globals().update(_defaults())
