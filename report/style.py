"""One look per router, the same in every picture: colour for the screen, line style and marker for black and white.

No two routers share a marker, and the paper's five differ in line style too, so nothing depends on
colour alone. The colours, mostly Okabe and Ito's, tell colour-blind readers routers apart: KERN's
family is warm, softmax's blue, sigmoid's green.
"""

from typing import Any

from router import ROUTERS

DENSE_DOTS, LONG_DASHES = (0, (1, 1)), (0, (7, 2))

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
OTHERS = [
    ("#000000", line, marker)
    for line, marker in zip(["-", LONG_DASHES, ":", "-."] * 2, "os^DvP*X", strict=True)
]


def style(router: str) -> dict[str, Any]:
    """Keyword arguments for matplotlib's `plot`: color, linestyle, marker.

    A router without a line above is black.
    """
    others = [name for name in ROUTERS if name not in STYLES]
    place = others.index(router) if router in others else -1
    look = STYLES.get(router, OTHERS[place % len(OTHERS)])
    return dict(zip(("color", "linestyle", "marker"), look, strict=True))
