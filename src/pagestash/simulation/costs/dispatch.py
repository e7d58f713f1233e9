"""Time of dispatch and combine: what each dispatcher sends.

`alltoall` sends every routed row to the rank of its expert: `T · K` rows of which `(EP − 1) / EP` leave the rank.

`flex` (DeepEP, HybridEP) sends a token once to each NVLink domain that has one of its experts, and there once to
each such rank. With K experts, chosen from `limit` of `groups` groups, a token needs one of n equal parts of the
experts with the probability

    1 − C(groups − groups/n, limit) / C(groups, limit)                    n ≤ groups: a part has whole groups
    limit / groups · (1 − (1 − groups / (n · limit)) ^ K)                 else

Both links work side by side; the slower one decides. For 4,096 tokens of width 7,168 and 8 of 256 experts, one way,
arXiv 2603.07685 has 1,485 µs on H100 with EP 16 (here 1,377), 4,626 with EP 64 (4,851), 391 on GB200 with EP 8
(383) and 675 with EP 64 (759).
"""

from math import comb

from pagestash.simulation.model.run import Run


def dispatch_seconds(run: Run) -> float:
    """Of the rows of one layer and microbatch, one way, to the hottest rank."""
    config, cluster, ranks = run.config, run.cluster, run.layout.ep
    if ranks == 1:
        return 0.0
    row = run.skew * run.element_bytes * run.row_width
    if run.dispatcher == "alltoall":
        return cluster.all_to_all_seconds(row * run.rows * (ranks - 1) / ranks, ranks)
    node = cluster.node
    inside = min(ranks, node.nvlink_devices)
    domains = -(-ranks // inside)
    once = row * run.local_tokens

    def others(parts: int) -> float:
        """Expected parts that a token goes to, its own one left out."""
        return (parts - 1) * needed(parts, config.top_k, config.groups, config.group_limit)

    network = once * others(domains) / node.network_rate
    nvlink = once * others(ranks) / node.nvlink_rate
    return node.latency + max(network, nvlink)


def needed(parts: int, top_k: int, groups: int = 1, limit: int = 1) -> float:
    """The probability that a token has an expert in one of `parts` equal parts."""
    if groups > 1 and groups % parts == 0:
        mine = groups // parts
        return min(1 - comb(groups - mine, limit) / comb(groups, limit), 1 - (1 - 1 / parts) ** top_k)
    share = limit / groups if groups > 1 else 1.0
    return share * (1 - (1 - min(1.0, 1 / (parts * share))) ** top_k)
