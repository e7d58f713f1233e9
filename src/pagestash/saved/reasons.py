"""Why a rule moves nothing, in words: a keeper says it of its first steps, `Profile.fits` of a measured one."""

from pagestash.policy import Rule
from pagestash.sizes import format_bytes

NO_FRACTION = "its fraction is 0"
WITHIN_WINDOW = (
    "all that it saves is within the window of what backward asks for next, which stays on the device: it pays for "
    "several layers, or with a smaller prefetch_bytes"
)
NO_EXPECTED_ROWS = "it saves no expected rows of min_bytes or more; MoEConfig(expected_rows=...) makes them"
ONLY_WEIGHTS = "its regions ran, and saved nothing but weights"
FOR_REPLAY = "a recomputed region discards its tensors, or holds them for its replay"


def kept_by(region: str) -> str:
    """Another region keeps what the rule would move; "" is what is outside all regions."""
    where = f"region {region!r}" if region else "what is outside all regions"
    return f"{where} saves the same tensors, and keeps them; give that a rule, too"


def too_small(largest: int, rule: Rule) -> str:
    """No tensor has `min_bytes`."""
    return (
        f"its largest saved tensor has {format_bytes(largest)}, and min_bytes is "
        f"{format_bytes(rule.least_bytes)}"
    )
