"""Widgets. Parts below ask for them by `sft_nb.extensions.extension`."""


def _run_panel():
    from .run import RunPanel
    return RunPanel


EXTENSIONS = {"run_panel": _run_panel}   # kind -> a function that makes it, called when it is first asked for
