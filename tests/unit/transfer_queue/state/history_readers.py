"""The model of other readers: where each began, and which groups it has acknowledged since."""

from rl_async.messages import ConsumerRecord, Delivered, Done, Refused, Subscription, Task
from rl_async.transfer_queue.store import Store
from tests.unit.transfer_queue.state.history import BATCH, STEPS, Announced
from tests.unit.transfer_queue.state.history_batches import Batches


def record(store: Store, name: str) -> ConsumerRecord:
    """What the queue says of a consumer."""
    (found,) = [found for found in store.inspect(0.0, {}).consumers if found.name == name]
    return found


def refused(answer: object, code: str) -> bool:
    """Whether the answer says so."""
    return isinstance(answer, Refused) and answer.code == code


class Readers:
    """Consumers of one queue by name."""

    def __init__(self) -> None:
        self._began: dict[str, int] = {}  # positions
        self._groups: dict[str, list[int]] = {}  # acknowledged, in order

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return sorted(self._began)

    def subscribe(self, store: Store, name: str, oldest: bool) -> None:
        """One more, unless it exists."""
        answer = store.consumers.subscribe(name, oldest)
        assert isinstance(answer, Subscription)
        self._began.setdefault(name, answer.position)
        self._groups.setdefault(name, [])
        assert store.consumers.subscribe(name, not oldest) == answer

    def unsubscribe(self, store: Store, name: str) -> None:
        """One less."""
        del self._began[name], self._groups[name]
        assert store.consumers.unsubscribe(name) == store.consumers.unsubscribe(name) == Done()
        assert refused(store.consumers.read(name, -1, 1), "unknown_consumer")

    def read(
        self,
        store: Store,
        name: str,
        seen: Announced,
        batches: Batches,
        tasks: dict[int, Task],
        *,
        count: int,
        acknowledged: int,
        ahead: int,
    ) -> None:
        """Read ``count`` groups from ``ahead`` of its place on, and acknowledge some of them."""
        position, behind = record(store, name).position, record(store, name).behind
        if ahead > behind:
            assert refused(store.consumers.read(name, position + ahead, count), "bad_position")
        after = position + min(ahead, behind)
        reply = store.consumers.read(name, after, count)
        assert isinstance(reply, Delivered) and len(reply.groups) <= count
        here, lost = seen.groups_with_rows(), seen.lost()
        for place, group in enumerate(reply.groups, start=max(after, position) + 1):
            assert group.position == place and group.group_id in here
            kept = [h for h in batches.rows[group.step] if (h.group_id, h.sample) not in lost]
            kept = [h for h in kept if h.group_id == group.group_id]
            assert [h for h in group.headers if (h.group_id, h.sample) not in lost] == kept
            assert group.task == tasks[group.group_id]
        for group in reply.groups[:acknowledged] if ahead <= 0 else []:
            for _ in range(2):
                assert store.consumers.acknowledge(name, group.position) == Done()
            assert group.group_id not in self._groups[name], "every group comes once"
            self._groups[name].append(group.group_id)

    def read_to_the_end(self, store: Store, name: str, seen: Announced, batches: Batches) -> None:
        """Every group that was trained since it subscribed, and was not given up, has come once."""
        self.miss_only_what_is_counted(store)
        groups = self._groups[name]
        reply = store.consumers.read(name, -1, 1 << 20)
        assert isinstance(reply, Delivered) and {group.group_id for group in reply.groups} <= seen.groups_with_rows()
        groups += [group.group_id for group in reply.groups]
        assert len(groups) == len(set(groups))
        end = record(store, name).position + record(store, name).behind
        assert len(groups) + reply.skipped == end - self._began[name]
        trained = [group for step in range(STEPS) for group in batches.members[step]]
        assert set(groups) <= set(trained) and groups == sorted(groups, key=trained.index)
        since = trained[len(trained) - len(groups) :]
        assert reply.skipped or set(since) == set(groups), "only what was given up is missing"
        if reply.groups:
            assert store.consumers.acknowledge(name, reply.groups[-1].position) == Done()
            assert store.consumers.read(name, -1, 1) == Delivered(groups=[], skipped=reply.skipped)
        assert refused(store.consumers.acknowledge(name, STEPS * BATCH + 1), "bad_position")

    def miss_only_what_is_counted(self, store: Store) -> None:
        """What holds at any time."""
        for name in self.names:
            found = record(store, name)
            assert found.position == self._began[name] + len(self._groups[name]) + found.skipped and found.behind >= 0
