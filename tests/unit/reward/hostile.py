"""A thousand answers that want to break the judge, by kind. Pure; the random ones depend on a seed."""

import random
from collections.abc import Iterator

PIECES = [
    *(
        r"\frac",
        r"\sqrt",
        r"\boxed",
        r"\left(",
        r"\right)",
        r"\int_0^1",
        r"\sum_{k=1}^{n}",
        r"\lim_{x\to0}",
        r"\begin{pmatrix}",
    ),
    *(
        r"\end{pmatrix}",
        r"\cup",
        r"\text{",
        r"\binom{3}{2}",
        r"\log_2",
        r"\sin",
        r"\pm",
        r"\\",
        r"\%",
        r"\$",
        r"\infty",
        r"\le",
    ),
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "$",
        "^",
        "_",
        "=",
        "<",
        "|",
        ",",
        "+",
        "-",
        "!",
        "x",
        "y",
        "7",
        "12",
        "0",
        ".",
        " or ",
        " ",
    ),
]
CODE = [
    "__import__('os').system('exit 1')",
    "'; DROP TABLE answers; --",
    "lambda: (yield)",
    "while True: pass",
    "<script>alert(5)</script>",
    "{{7*7}}${7*7}#{7*7}",
    "%s%n%x",
    "$(touch /nowhere/file)",
    "import sympy; sympy.factorint(10**80+1)",
    "exec(chr(112)*9)",
]


def cheap() -> Iterator[str]:
    """Yield 1000 responses that are refused or judged without long computation."""
    yield from ("{" * 10_000_000, r"\boxed" * 50_000, r"\boxed{" + "(" * 100_000 + ")" * 100_000 + "}", "$" * 300_000)
    for depth in range(2, 62):
        yield r"\boxed{" + "9^{" * depth + "9" + "}" * depth + "}"
        yield "Answer: " + "(" * depth + "5" + ")" * depth
        yield r"\boxed{" + r"\boxed{" * depth + "5"
    for code in range(32):
        yield f"Answer: 5{chr(code)}0"
        yield f"\\boxed{{{chr(code)}5}}x{chr(code)}"
    for text in CODE:
        for form in ("{}", "Answer: {}", "```python\n{}\n```", "#### {}", "A: {}", "$${}", "<think>{}"):
            yield form.format(text)
    for digits in range(500, 20_500, 500):
        yield f"Answer: {'7' * digits}"
    for text in (
        "\ud800",
        "\udfff",
        "\u202e5\u202d",
        "5\u0301" * 50,
        "\U0001f600",
        "\ufeff5",
        "\u0665",
        "\u4e94",
        "\u2460",
        "5\u200d",
        "1e999999999",
    ):
        for form in ("{}", "Answer: {}", "\\boxed{{{}}}"):
            yield form.format(text)
    for size in range(10, 110, 10):
        yield r"\boxed{" + r"\begin{" * size
        yield r"Answer: \[" + "5" * size
        yield "Answer: 5" + "!" * size
        yield "Answer: " + "-" * size + "4"
        yield "Answer: " + "1/" * size + "0"
        yield r"\boxed{\binom{10^{" + str(size) + r"}}{5}}"
        yield r"\boxed{10^{" + "9" * size + "}}"
    chosen = random.Random(5)
    while True:
        soup = "".join(chosen.choices(PIECES, k=chosen.randrange(1, 12)))
        yield chosen.choice(("\\boxed{{{}}}", "Answer: {}", "{}", "#### {}")).format(soup)


SLOW = [
    r"\sum_{k=1}^{10^{9}} k^{k}",
    r"\prod_{k=1}^{10^{8}} (k^2+1)",
    r"\int_0^1 \frac{e^{x^x} \sin(\cos x)}{\sqrt[7]{1+x^{13}}} dx",
    r"\lim_{x\to\infty} \frac{x^{x^{x}}}{(x!)^{x!}}",
    r"\sum_{k=1}^{10^{7}} \frac{1}{k^{k}}",
]
