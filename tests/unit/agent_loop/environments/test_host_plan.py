"""Who gets which environment, and which host is replaced when: decided without processes, on a clock of the test's."""

import random

import pytest

from rl_async.agent_loop.environments.host_pool import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_FAILURES,
    Give,
    HostPlan,
    Prepare,
    Refuse,
    StartHost,
    StopHost,
)


def started(*, prepares: bool = True, hosts: int = 1, most: int = 8, ready: int = 0, starting: int = 8) -> HostPlan:
    """A plan whose hosts 0, 1, ... are up."""
    plan = HostPlan(hosts=hosts, most=most, ready=ready, starting=starting)
    assert plan.decide(0.0) == [StartHost(host) for host in range(hosts)]
    for host in range(hosts):
        plan.host_started(host, prepares=prepares)
    return plan


def test_what_is_prepared_ahead_is_given_at_once_and_replaced() -> None:
    plan = started(ready=2)
    assert plan.decide(0.0) == [Prepare(0, 0), Prepare(0, 1)]
    plan.prepared(0)
    plan.prepared(1)
    assert plan.decide(0.0) == []
    plan.ask(5)
    assert plan.decide(0.0) == [Give(5, 0, 0), Prepare(0, 2)]


def test_nothing_is_prepared_ahead_unless_it_is_asked_for() -> None:
    plan = started()
    assert plan.decide(0.0) == []
    plan.ask(5)
    assert plan.decide(0.0) == [Prepare(0, 0)]
    assert plan.decide(0.0) == []
    plan.prepared(0)
    assert plan.decide(0.0) == [Give(5, 0, 0)]


def test_without_preparation_an_episode_gets_the_right_to_open_one() -> None:
    plan = started(prepares=False, starting=2)
    for ticket in range(3):
        plan.ask(ticket)
    assert plan.decide(0.0) == [Give(0, 0, 0), Give(1, 0, 1)]
    plan.opened(0)
    assert plan.decide(0.0) == [Give(2, 0, 2)]


def test_no_more_start_at_once_and_live_at_once_than_allowed() -> None:
    plan = started(most=3, ready=1, starting=2)
    for ticket in range(3):
        plan.ask(ticket)
    assert plan.decide(0.0) == [Prepare(0, 0), Prepare(0, 1)]
    plan.prepared(0)
    plan.prepared(1)
    assert plan.decide(0.0) == [Give(0, 0, 0), Give(1, 0, 1), Prepare(0, 2)]
    plan.prepared(2)
    assert plan.decide(0.0) == [Give(2, 0, 2)], "no room to prepare one more"
    plan.ending(0)
    assert plan.decide(0.0) == [], "one that is being closed still lives"
    plan.ended(0)
    assert plan.decide(0.0) == [Prepare(0, 3)]


def test_environments_are_spread_over_the_hosts() -> None:
    plan = started(hosts=2, ready=4)
    assert [action.host for action in plan.decide(0.0) if isinstance(action, Prepare)] == [0, 1, 0, 1]


def test_who_waits_no_longer_gets_none() -> None:
    plan = started()
    plan.ask(1)
    plan.ask(2)
    plan.withdraw(1)
    assert plan.decide(0.0) == [Prepare(0, 0)]
    plan.prepared(0)
    assert plan.decide(0.0) == [Give(2, 0, 0)]
    plan.withdraw(2)  # too late, and no harm


def test_a_lost_host_is_replaced_at_once_and_what_it_prepared_is_prepared_again() -> None:
    plan = started(ready=1)
    assert plan.decide(0.0) == [Prepare(0, 0)]
    plan.prepared(0)
    plan.decide(0.0)
    plan.host_lost(0, "killed", 1.0)
    assert plan.decide(1.0) == [StartHost(1)]
    plan.host_started(1, prepares=True)
    assert plan.decide(1.0) == [Prepare(1, 1)]
    for late in (plan.prepared, plan.opened, plan.ending, plan.ended):
        late(0)  # of an environment that was lost with its host
    plan.prepare_failed(0, "late", 1.0)


def test_a_host_that_ends_again_and_again_is_started_after_growing_pauses() -> None:
    plan, now, pauses = started(), 0.0, []
    for host in range(12):
        plan.host_lost(host, "killed", now)
        at = plan.wake_at(now)
        pauses.append((at or now) - now)
        assert (at is None) == (host == 0)
        assert host == 0 or plan.decide(now) == []
        now = at or now
        assert plan.decide(now) == [StartHost(host + 1)]
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_who_waits_is_told_when_no_host_can_be_started() -> None:
    plan, now = HostPlan(hosts=1, most=8, ready=0, starting=8), 0.0
    plan.ask(3)
    for host in range(MOST_FAILURES):
        assert not any(isinstance(action, Refuse) for action in plan.decide(now)), host
        plan.host_lost(host, "exploded", now)
        now = plan.wake_at(now) or now
    assert Refuse(3, "exploded") in plan.decide(now)


def test_a_success_forgets_earlier_failures() -> None:
    plan = started(prepares=False)
    plan.host_lost(0, "killed", 0.0)
    plan.decide(0.0)
    plan.host_started(1, prepares=False)
    plan.ask(0)
    assert plan.decide(0.0) == [Give(0, 1, 0)]
    plan.opened(0)
    plan.host_lost(1, "killed", 5.0)
    assert plan.decide(5.0) == [StartHost(2)], "without a pause"


def test_a_failed_preparation_is_told_to_one_who_waits() -> None:
    plan = started()
    plan.ask(1)
    plan.ask(2)
    assert plan.decide(0.0) == [Prepare(0, 0), Prepare(0, 1)]
    plan.prepare_failed(0, "no image", 0.0)
    assert plan.decide(0.0) == [Refuse(1, "no image")]
    plan.ended(0)
    plan.prepared(1)
    assert plan.decide(0.0) == [Give(2, 0, 1)]


def test_preparing_ahead_pauses_after_failures_but_not_for_those_who_wait() -> None:
    plan, now = started(ready=1), 0.0
    for instance in range(3):
        assert plan.decide(now) == [Prepare(0, instance)]
        plan.prepare_failed(instance, "no image", now)
        plan.ended(instance)
        now = plan.wake_at(now) or now
    assert now == 3 * FIRST_PAUSE_S
    before = now - FIRST_PAUSE_S
    assert plan.decide(before) == []
    plan.ask(1)
    assert plan.decide(before)[0] == Prepare(0, 3)


def test_a_host_with_a_call_that_never_returns_is_replaced_and_ends_when_the_others_are_through() -> None:
    plan = started(prepares=False)
    plan.ask(0)
    plan.ask(1)
    plan.decide(0.0)
    plan.ended(0, stuck=True)
    assert plan.decide(0.0) == [StartHost(1)]
    plan.host_started(1, prepares=False)
    plan.ask(2)
    assert plan.decide(0.0) == [Give(2, 1, 2)], "the stuck host gets nothing new"
    plan.ended(1)
    assert plan.decide(0.0) == [StopHost(0)]
    plan.host_lost(0, "was replaced", 0.0)
    assert plan.decide(0.0) == [], "it was no loss"


def test_what_a_draining_host_has_prepared_is_used_first() -> None:
    plan = started(hosts=2, ready=2)
    plan.decide(0.0)
    plan.prepared(0)
    plan.prepared(1)
    plan.ask(0)
    assert Give(0, 0, 0) in plan.decide(0.0)
    plan.prepared(2)  # at host 0
    plan.ask(1)
    assert Give(1, 1, 1) in plan.decide(0.0)
    plan.prepared(3)
    plan.ended(1, stuck=True)
    for action in plan.decide(0.0):
        assert action == StartHost(2)
    plan.ask(2)
    assert Give(2, 1, 3) in plan.decide(0.0)


def test_a_stuck_environment_still_takes_room() -> None:
    plan = started(prepares=False, most=2)
    for ticket in range(3):
        plan.ask(ticket)
    assert plan.decide(0.0) == [Give(0, 0, 0), Give(1, 0, 1)]
    plan.ended(0, stuck=True)
    assert plan.decide(0.0) == [StartHost(1)]
    plan.host_started(1, prepares=False)
    assert plan.decide(0.0) == []
    plan.ended(1)
    assert plan.decide(0.0) == [StopHost(0), Give(2, 1, 2)]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_everyone_is_served_or_told_and_no_limit_is_broken(seed: int) -> None:
    draw = random.Random(seed)
    prepares, ready, starting, most = draw.random() < 0.7, draw.randrange(3), draw.randrange(1, 4), draw.randrange(3, 7)
    plan = HostPlan(hosts=draw.randrange(1, 3), most=most, ready=ready, starting=starting)
    now, tickets = 0.0, 0
    waiting, starting_hosts, hosts = set[int](), set[int](), set[int]()
    preparing, opening, in_use, ending = (dict[int, int]() for _ in range(4))  # environments and their hosts
    prepared = dict[int, int]()

    def lose(host: int) -> None:
        starting_hosts.discard(host)
        hosts.discard(host)
        for group in (preparing, opening, in_use, ending, prepared):
            for instance in [instance for instance, at in group.items() if at == host]:
                del group[instance]

    for step in range(1000):
        ask = step < 300
        for action in plan.decide(now):
            match action:
                case StartHost(host):
                    starting_hosts.add(host)
                case StopHost(host):
                    assert host not in {at for g in (preparing, opening, in_use, ending) for at in g.values()}
                    lose(host)
                case Prepare(host, instance):
                    assert host in hosts and prepares
                    preparing[instance] = host
                case Give(ticket, host, instance):
                    assert host in hosts
                    assert (prepared.pop(instance) == host) if prepares else instance not in in_use | opening
                    waiting.remove(ticket)
                    opening[instance] = host
                case Refuse(ticket, _):
                    waiting.remove(ticket)
        assert len(preparing | opening | in_use | ending | prepared) <= most
        assert len(preparing if prepares else opening) <= starting
        choices = ["wait", "host up", "prepared", "open", "end", "ended"]
        choices += ["ask", "ask", "lose", "prepare fails", "stuck", "withdraw"] if ask else []
        match draw.choice(choices) if ask else choices[step % len(choices)]:
            case "wait":
                now = plan.wake_at(now) or now
            case "ask":
                waiting.add(tickets)
                plan.ask(tickets)
                tickets += 1
            case "withdraw" if waiting:
                ticket = draw.choice(sorted(waiting))
                waiting.remove(ticket)
                plan.withdraw(ticket)
            case "host up" if starting_hosts:
                host = starting_hosts.pop()
                hosts.add(host)
                plan.host_started(host, prepares=prepares)
            case "lose" if hosts | starting_hosts:
                host = draw.choice(sorted(hosts | starting_hosts))
                lose(host)
                plan.host_lost(host, "lost", now)
            case "prepared" if preparing:
                instance, host = preparing.popitem()
                prepared[instance] = host
                plan.prepared(instance)
            case "prepare fails" if preparing:
                instance, ending[instance] = (taken := preparing.popitem())[0], taken[1]
                plan.prepare_failed(instance, "failed", now)
            case "open" if opening:
                instance, in_use[instance] = (taken := opening.popitem())[0], taken[1]
                plan.opened(instance)
            case "end" if in_use:
                instance, ending[instance] = (taken := in_use.popitem())[0], taken[1]
                plan.ending(instance)
            case "ended" | "stuck" as how if ending:
                instance, _ = ending.popitem()
                plan.ended(instance, stuck=how == "stuck")
    assert not waiting, "nothing is lost in the last steps, which serve all who had waited"
