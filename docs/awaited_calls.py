"""Show the calls of `AsyncStreamhouseClient` in the reference, with arguments and documentation.

The class has `append = _awaited(StreamhouseClient.append)`, which is an attribute for Griffe, the
library that reads the docstrings: `make site` reads sources, and runs none of them.
"""

from __future__ import annotations

import griffe


class AwaitedCalls(griffe.Extension):
    """Replaces `NAME = _awaited(CLASS.CALL)` by the call, as an `async` method."""

    def on_class(self, *, cls: griffe.Class, loader: griffe.GriffeLoader, **_: object) -> None:
        for name, member in list(cls.members.items()):
            value = getattr(member, "value", None)
            if not isinstance(value, griffe.ExprCall):
                continue
            if str(value.function) in {"_awaited", "_opened"}:
                cls.set_member(name, _method(name, cls, value, loader))


def _method(
    name: str, cls: griffe.Class, value: griffe.ExprCall, loader: griffe.GriffeLoader
) -> griffe.Function:
    home, _, call_name = value.arguments[0].canonical_path.rpartition(".")
    call = loader.modules_collection[home].all_members[call_name]
    # What `_opened` makes of the result is its second argument.
    result = value.arguments[1] if len(value.arguments) > 1 else call.returns
    method = griffe.Function(
        name,
        lineno=cls.lineno,
        endlineno=cls.endlineno,
        parameters=call.parameters,
        returns=result,
        docstring=call.docstring,
        parent=cls,
    )
    method.labels.add("async")
    return method
