from trainwright.doctor import Every, NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts

MAX_REACHED = 0.25  # Fraction of the nodes from the first to the last one that an edge names
MIN_CROSSING = 0.01  # Fraction of the edges


@check(points_at=("loader", "forward"), stage="input", confidence=0.9)
def edges_not_shifted(run: RunContext, exams: Every[BatchFacts]) -> Results:
    """Graphs are joined into one batch without the correct offset of node numbers, so edges connect wrong nodes.

    Why it matters: nodes receive messages from other graphs, and many receive none.

    How it is detected: a batch joins eight or more graphs, with edges (2, E): a loader says so, or an input numbers the
    graph of each node. In every examined batch all edges are among the first quarter of the nodes; or, if an input
    numbers the graphs, edges connect nodes of different graphs.

    Usual cause: a collate function concatenates `edge_index` without an offset, or with another offset than the number
    of nodes of all graphs before.

    Fix: add the number of nodes of all previous graphs to each `edge_index`.

        offsets = itertools.accumulate((g.num_nodes for g in graphs[:-1]), initial=0)
        edge_index = torch.cat([g.edge_index + n for g, n in zip(graphs, offsets)], 1)

    Sources: pyg-team/pytorch_geometric#6884, deepchem PR 3291.
    """
    seen = [(facts.reached, facts.nodes) for _, facts in exams if facts.nodes]
    crossing = [facts.crossing for _, facts in exams if facts.nodes]
    if not seen:
        yield NotApplicable("no batch of several graphs with edges")
    elif all(reached <= MAX_REACHED * nodes for reached, nodes in seen):
        reached, nodes = seen[-1]
        yield run.finding(
            symptom=f"no edge of the batch names a node beyond number {reached - 1}, and there are {nodes}: the node "
            "numbers are those within each graph",
            evidence=[("largest node number of an edge + 1", reached, f"about {nodes}")],
        )
    elif min(crossing) > MIN_CROSSING:
        yield run.finding(
            symptom=f"{crossing[-1]:.0%} of the edges connect nodes of different graphs: the offset of the "
            "node numbers is not the number of nodes of all graphs before",
            evidence=[("edges between graphs", crossing[-1], 0)],
        )
