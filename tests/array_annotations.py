"""Checks at run time the annotations that have an array's shape and dtype, by jaxtyping and beartype.

Other annotations are pyrefly's: to check them at every call took a tenth of the tests' time.
"""

import ast

import beartype
from jaxtyping import _import_hook

checked = beartype.beartype  # by its own name, the compiled modules are other files than jaxtyping's own hook leaves


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


_import_hook.JaxtypingTransformer = _Transformer
