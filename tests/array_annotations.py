"""Checks at run time the annotations that have an array's shape and dtype, by jaxtyping and beartype.

To check all others at every call too takes a tenth of the tests' time. The smoke tests and `tools/test.sh long` do:
`--jaxtyping-packages=eagle3_jax,beartype.beartype`.
"""

import ast
import hashlib

import beartype
from jaxtyping import _import_hook

checked = beartype.beartype  # under another name: the compiled modules are other files, and the hook's hash is another
_OWN = hashlib.md5(f"{__name__}.checked".encode()).hexdigest()
ALL = _OWN not in _import_hook.Typechecker.lookup  # whether every annotation is checked


def _has_shape(annotation: ast.expr | None) -> bool:
    """Tells whether an annotation has a jaxtyping type in it, such as `Float[Array, "b t"]`."""
    nodes = ast.walk(annotation) if annotation is not None else ()
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in node.slice.elts)
        for node in nodes
    )


class _Transformer(_import_hook.JaxtypingTransformer):
    """Decorates functions and classes that have such an annotation."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        if any(map(_has_shape, (node.returns, *(x.annotation for x in every)))):
            return super().visit_FunctionDef(node)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        if any(isinstance(field, ast.AnnAssign) and _has_shape(field.annotation) for field in node.body):
            return super().visit_ClassDef(node)
        self.generic_visit(node)
        return node


if not ALL:
    _import_hook.JaxtypingTransformer = _Transformer
