"""One style per router, the same in every picture: colour, line style and marker.

No two routers share a marker, and the paper's five differ in line style too, so a picture can be
read in black and white. The colours, mostly Okabe and Ito's, tell colour-blind readers routers
apart: KERN's family is warm, softmax's blue, sigmoid's green. A new router needs no line here: it
gets the next style of CYCLE.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from configure.schema import read_router_names

DENSE_DOTS = (0, (1, 1))
LONG_DASHES = (0, (7, 2))
STYLES = {  # router: colour, line style, marker
    "dense": ("#555555", DENSE_DOTS, "x"),
    "softmax": ("#0072B2", "--", "s"),
    "sigmoid": ("#009E73", "-.", "^"),
    "tanh": ("#CC79A7", ":", "v"),
    "kern": ("#D55E00", "-", "o"),
    "kern-norelu": ("#E69F00", "--", "D"),
    "kern-after": ("#E69F00", "-.", "P"),
    "kern-mc": ("#A33B00", LONG_DASHES, "*"),
    "kern-nogamma": ("#A33B00", ":", "d"),
    "kern-nobias": ("#A33B00", "-.", "p"),
    "softmax-renorm": ("#56B4E9", "-", "<"),
    "sigmoid-renorm": ("#00583F", "--", ">"),
    "sqrtsoftplus": ("#00583F", ":", "h"),
    "softmax-l2": ("#003F63", LONG_DASHES, "X"),
    "sqrtgate": ("#003F63", ":", "8"),
}
GREY = "#999999"  # of variants that do not lead
NO_TOKEN = "#E69F00"  # of an expert without a token
# Okabe and Ito's, for lines of one picture whose own colours are not distinct
DISTINCT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# For routers without a line above: colours of Tol's muted scheme and markers that are free.
CYCLE = [
    ("#000000", "-", "H"),
    ("#332288", "--", "1"),
    ("#999933", "-.", "2"),
    ("#882255", LONG_DASHES, "3"),
    ("#117733", "-", "4"),
    ("#AA4499", "--", "+"),
    ("#661100", "-.", "|"),
    ("#44AA99", LONG_DASHES, "_"),
]


def choose_style(router: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Keyword arguments for matplotlib's `plot`: color, linestyle, marker.

    Args:
        router: a name in ROUTERS, or a formula.
        others: routers in the same picture, so that formulas differ from each other.
    """
    names = dict.fromkeys([*read_router_names(), *others, router])
    new = [name for name in names if name not in STYLES]
    if router in STYLES:
        colour, line, marker = STYLES[router]
    else:
        colour, line, marker = CYCLE[new.index(router) % len(CYCLE)]
    return {"color": colour, "linestyle": line, "marker": marker}


def choose_styles(routers: Sequence[str]) -> list[dict[str, Any]]:
    """The styles of lines of one picture; where two colours are equal, all get others."""
    styles = [choose_style(router, routers) for router in routers]
    colours = {style["color"] for style in styles}
    if len(colours) < len(styles) <= len(DISTINCT):
        for style, colour, marker in zip(styles, DISTINCT, "os^DvP", strict=False):
            style |= {"color": colour, "marker": marker}
    return styles
