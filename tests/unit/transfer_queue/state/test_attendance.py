"""Whether anybody plays: workers always, gateways only while their programs are there."""

from rl_async.transfer_queue.store import HEARD_S, REMEMBERED, Attendance


def test_without_workers_nobody_is_known_to_be_away() -> None:
    assert Attendance().unattended_s(5.0) == 0.0


def test_a_gateway_without_programs_is_unattended_from_when_they_left() -> None:
    attendance = Attendance()
    attendance.hear("gateway", 100.0, 30.0)
    assert attendance.unattended_s(102.0) == 32.0
    attendance.hear("gateway", 104.0)  # a renewal says nothing of programs
    assert attendance.unattended_s(104.0) == 34.0
    attendance.hear("gateway", 105.0, 0.0)
    assert attendance.unattended_s(150.0) == 0.0


def test_a_pause_between_two_episodes_is_no_absence() -> None:
    attendance = Attendance()
    attendance.hear("gateway", 100.0, 3.0)
    assert attendance.unattended_s(100.0) == 0.0 and attendance.unattended_s(120.0) == 23.0


def test_whoever_plays_counts() -> None:
    attendance = Attendance()
    attendance.hear("a", 100.0, 50.0)
    attendance.hear("b", 100.0, 20.0)
    assert attendance.unattended_s(100.0) == 20.0
    attendance.hear("agent-0", 100.0)
    assert attendance.unattended_s(100.0) == 0.0, "an agent worker needs no program"
    attendance.hear("a", 101.0 + HEARD_S, 111.0)
    assert attendance.unattended_s(101.0 + HEARD_S) == 111.0, "the others are gone"
    assert attendance.unattended_s(200.0 + 2 * HEARD_S) == 0.0, "and without any worker the deadlines hold"


def test_it_remembers_a_bounded_number_of_workers() -> None:
    attendance = Attendance()
    for number in range(REMEMBERED + 50):
        attendance.hear(f"gateway-{number}", 0.0, 30.0)
    assert len(attendance._heard) == len(attendance._away_since) == REMEMBERED
