"""Injected faults: the words of a plan, nothing without one, and each action in real jobs."""

from __future__ import annotations

import launching
import pytest
from replicas import RANK, SIZE, all_raise

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract import public_calls
from mpistrategy.mpi.faults.injection import Fault, parse

# Every rank prints what it got. Rank 0 wakes a peer that was stopped.
PROGRAM = """
import os, signal, sys, threading
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
rank, size = strategy.replica_id_in_sync_group, strategy.num_replicas_in_sync
pid = int(strategy.run(lambda: ms.get_replica_context().all_gather(np.array([os.getpid()]), 0))[-1])


def wake_when_stopped():
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "tT":
        pass
    sys.stdout.write("was stopped\\n")
    os.kill(pid, signal.SIGCONT)


if "do=stop" in os.environ["MPISTRATEGY_INJECT"] and rank == 0:
    threading.Thread(target=wake_when_stopped, daemon=True).start()


def step():
    context = ms.get_replica_context()
    first = context.all_reduce("SUM", np.arange(3.0) + rank)
    second = context.all_reduce("SUM", {"a": np.arange(4.0) + rank})["a"]
    third = context.all_reduce("SUM", float(rank))
    return np.concatenate([first, second, [third]])


got = strategy.run(step)
right = sum(np.concatenate([np.arange(3.0) + r, np.arange(4.0) + r, [r]]) for r in range(size))
differ = np.flatnonzero(got != right).tolist()
sys.stdout.write(f"rank {rank}: {'right' if not differ else f'wrong at {differ}'}\\n")
"""


# ------------------------------------------------------------------------------------------------ the words


def test_words_of_a_plan() -> None:
    words = "Rank=2, at=allreduce # 17, do=kill"
    assert parse(words, "here", 3) == (Fault(words.lower(), (2,), "allreduce", 17, "kill"),)
    first, second = "do=delay:0.5s,rank=2+0,at=#3", "rank=any,at=reduce#1,do=raise"
    assert parse(f"{first}; {second}", "here", 3) == (
        Fault(first, (2, 0), "", 3, "delay", 0.5),
        Fault(second, None, "reduce", 1, "raise"),
    )
    assert parse("  ", "here", 3) == ()


MALFORMED = {
    "rank=2": "rank=, at= and do=, once each",
    "kill": "rank=, at= and do=",
    "rank=2, at=allreduce#17, do=kill;": "rank=, at= and do=",
    "rank=2, at=allreduce#17, do=kill, do=stop": "rank=, at= and do=, once each",
    "rank=2, at=allreduce#17, do=explode": "kill, stop, raise, delay:0.5s",
    "rank=2, at=all_reduce#17, do=kill": "allreduce, allreduce_async, barrier, broadcast",
    "rank=2, at=allreduce, do=kill": "from 1 on",
    "rank=2, at=allreduce#0, do=kill": "from 1 on",
    "rank=2, at=allreduce#x, do=kill": "from 1 on",
    "rank=-1, at=#1, do=kill": "from 0 to 3",
    "rank=4, at=#1, do=kill": "from 0 to 3",
    "rank=0+, at=#1, do=kill": "from 0 to 3",
    "rank=\u0662, at=#1, do=kill": "from 0 to 3",
    "rank=2, at=#1, do=delay": "delay:0.5s",
    "rank=2, at=#1, do=delay:-1s": "delay:0.5s",
    "rank=2, at=#1, do=delay:1e9": "at most a day",
    "rank=2, at=#1, do=delay:nan": "delay:0.5s",
    "rank=2, at=#1, do=kill:3": "do= one of kill, stop",
    "rank=2, when=#1, do=kill": "rank=, at= and do=",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_plan_names_what_is_allowed(text: str) -> None:
    with pytest.raises(errors.OptionError) as raised:
        parse(text, "the plan", 4)
    assert str(raised.value).startswith("the plan: found ")
    assert MALFORMED[text] in str(raised.value)


# -------------------------------------------------------------------------------------- without a plan, and with one


def test_a_plan_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(public_calls.PLAN, "rank=any, at=allreduce#1000, do=kill")
    all_raise(errors.OptionError, ms.MirroredStrategy, words=["after mpistrategy was imported"])


def test_a_malformed_plan_on_one_rank_raises_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    if RANK == SIZE - 1:
        monkeypatch.setenv(public_calls.PLAN, "rank=0, at=allreduce#1, do=nothing")
    all_raise(
        errors.OptionError, ms.MirroredStrategy, words=["found 'rank=0, at=allreduce#1, do=nothing'; expected rank="]
    )


# ------------------------------------------------------------------------------------------------ real jobs


# Every rank makes calls of many kinds, of which one raises everywhere.
CALLS = """
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
size = strategy.num_replicas_in_sync
with strategy.scope():
    var = ms.Variable(np.ones(2), aggregation="SUM")  # 1
    sgd = ms.optimizers.SGD(0.1)
strategy.run(lambda: sgd.apply_gradients([(np.ones(2), var)]))  # 2
strategy.extended.reduce_to("SUM", 1.0, var)  # 3
try:
    strategy.gather(np.ones(1), 0)  # 4
except ms.errors.InjectedFault as error:
    caught = str(error)
strategy.barrier()
dataset = strategy.experimental_distribute_dataset([np.ones(size)] * 3)
assert sum(float(part.sum()) for part in dataset) == 3
iterator = iter(dataset)
assert len([iterator.get_next() for _ in range(3)]) == 3
got = strategy.run(lambda: ms.get_replica_context().all_reduce_async("SUM", np.ones(2, np.int64)).wait())
assert got.tolist() == [size, size]
print(caught.partition(":")[0] + "\\n", end="")
"""


def run(launch: launching.Launch, plan: str, ranks: int = 2, program: str = PROGRAM) -> launching.Finished:
    return launch(ranks, program, timeout=30, env={public_calls.PLAN: plan})


def test_calls_of_many_kinds_without_those_within_calls(launch: launching.Launch) -> None:
    """A fault on all ranks is raised on all, and the strategy goes on."""
    plan = "rank=any, at=#4, do=raise; rank=1, at=next#2, do=delay:0.01; rank=1, at=wait#1, do=delay:0.01"
    done = run(launch, plan, program=CALLS).check()
    assert done.stdout.splitlines() == ["rank=any, at=#4, do=raise"] * 2
    assert done.stderr.count("injected fault") == 4


@pytest.mark.each_mpi
def test_kill_ends_the_job(launch: launching.Launch) -> None:
    done = run(launch, "rank=1, at=allreduce#2, do=kill", 3)
    assert done.returncode != 0
    assert "[rank 1/3] injected fault at " in done.stderr
    assert "right" not in done.stdout


@pytest.mark.each_mpi
@pytest.mark.slow
def test_stop_stops_the_process_until_it_is_woken(launch: launching.Launch) -> None:
    done = run(launch, "rank=1, at=allreduce#2, do=stop").check()
    assert sorted(done.stdout.splitlines()) == ["rank 0: right", "rank 1: right", "was stopped"]
