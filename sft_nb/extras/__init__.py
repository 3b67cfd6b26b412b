"""Optional parts. The core asks for them by `sft_nb.extensions.extension`, and works without this folder."""


def _other_tools():
    from .other_tools import OtherTools
    return OtherTools()


# kind of extension -> a function that makes it, called when the core first asks for one
EXTENSIONS = {"known_names": _other_tools}
