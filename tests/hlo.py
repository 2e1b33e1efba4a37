"""What the CPU compiler made of a program: library fusions in its HLO text."""

import re


def product_and_sum_fusions(text: str) -> list[str]:
    """Bodies of YNNPACK fusions that hold both a product and a reduction.

    They are what jaxlib computes wrongly: in 0.10.2 over 32,769 rows and more (jax#39103); from 0.10.2 to 0.12.0.1 at
    least, at any size, where an operand of the product is one number broadcast.
    """
    bodies = dict(re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    fused = re.findall(r"calls=%?([\w.\-]+)[^\n]*__ynn_fusion", text)
    return [body for body in map(bodies.__getitem__, fused) if " dot(" in body and " reduce(" in body]
