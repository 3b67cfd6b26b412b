def __getattr__(name):
    "The names of `sft_nb.config.load`, which was this module in older versions"
    if name.startswith("__") or name == "load": raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(".load", __name__), name)
