"""The table of transitions itself."""

from cachelink_core.handoff import FINAL, TRANSITIONS, EventKind, State, diagram


def test_every_state_has_a_row_and_final_ones_lead_nowhere():
    assert set(TRANSITIONS) == set(State)
    assert {state for state, moves in TRANSITIONS.items() if not moves} == FINAL
    assert {state for state in State if state.final} == FINAL


def test_every_live_state_can_fail_be_aborted_and_expire():
    for state in set(State) - FINAL:
        moves = TRANSITIONS[state]
        assert moves[EventKind.FAIL] is State.FAILED
        assert moves[EventKind.ABORT] is State.FAILED
        assert moves[EventKind.EXPIRE] is State.EXPIRED


def test_only_one_way_leads_to_installed():
    way = [State.INSTALLED]
    while way[-1] is not State.OFFERED:
        sources = {
            state
            for state, moves in TRANSITIONS.items()
            for target in moves.values()
            if target is way[-1] and state is not target
        } - {State.RECEIVING if way[-1] is State.ADMITTED else None}  # a broken stream goes back
        assert len(sources) == 1, (way[-1], sources)
        way += sources
    assert way[::-1] == [
        State.OFFERED,
        State.ADMITTED,
        State.RECEIVING,
        State.VERIFIED,
        State.MAPPED,
        State.INSTALLED,
    ]


def test_every_event_is_allowed_somewhere():
    assert {event for moves in TRANSITIONS.values() for event in moves} == set(EventKind)


def test_the_diagram_draws_every_transition_once():
    lines = diagram().splitlines()
    drawn = set()
    for line in lines:
        source, arrow, rest = line.strip().partition(" --> ")
        target, colon, names = rest.partition(": ")
        if arrow and colon:
            drawn |= {(source, target, name) for name in names.split(", ")}
    expected = {
        (str(state), str(target), event.value)
        for state, moves in TRANSITIONS.items()
        for event, target in moves.items()
    }
    assert drawn == expected
    assert lines[0] == "stateDiagram-v2"
    assert [f"    {state} --> [*]" in lines for state in FINAL] == [True] * len(FINAL)
