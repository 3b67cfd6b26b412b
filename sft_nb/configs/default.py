"""The defaults, as names to import and override. They are written down once, in `sft_nb.config.Config`; see them with `sft_nb config`."""
from sft_nb.config import defaults as _defaults

globals().update(_defaults())
