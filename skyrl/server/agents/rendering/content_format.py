"""Whether a chat template reads contents as text or as lists of parts. vLLM decides by the same rule (its option
`chat_template_content_format: auto`): a template that loops over a message's content gets parts.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def reads_parts(template: nodes.Template) -> bool:
    """Of a template's syntax tree. A template with assignments that the rule does not know reads text."""
    try:
        return any(_content_loops(template))
    except _Unknown:
        return False


class _Unknown(Exception):
    pass


def _content_loops(root: nodes.Template) -> Iterator[bool]:
    messages = list(_messages_in_loops(root))
    macros = list(root.find_all(nodes.Macro))
    given = {id(macro): set(_given_contents(root, macro, messages)) for macro in macros}
    within = {id(loop): macro for macro in macros for loop in macro.find_all(nodes.For)}
    for loop in root.find_all(nodes.For):
        macro = within.get(id(loop))
        if any(_reads(loop.iter, name, "content") for name in messages):
            yield True
        elif isinstance(loop.iter, nodes.Name):
            yield loop.iter.name in given[id(macro)] if macro is not None else loop.iter.name == "content"


def _messages_in_loops(root: nodes.Template) -> Iterator[str]:
    """The names of single messages in loops over all of them."""
    lists = list(_aliases(root, "messages"))
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _name(loop.target)


def _aliases(root: nodes.Template, name: str) -> Iterator[str]:
    waiting, seen = [name], {name}
    while waiting:
        current = waiting.pop(0)
        yield current
        for assigned in root.find_all(nodes.Assign):
            if _reads(assigned.node, current) and (other := _name(assigned.target)) not in seen:
                seen.add(other)
                waiting.append(other)


def _given_contents(root: nodes.Template, macro: nodes.Macro, messages: list[str]) -> Iterator[str]:
    """The parameters of a macro that get a message's content somewhere."""
    names = [argument.name for argument in macro.args]
    for call in root.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
        for name, value in given:
            if name in names and any(_reads(value, message, "content") for message in messages):
                yield name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable, or its item `key`, perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads(node.node, name)


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unknown
    return target.name
