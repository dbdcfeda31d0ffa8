"""``rl-async play``: plays the episodes of a run with an agent program as it is."""

import argparse
import signal
from pathlib import Path

from rl_async.errors import EXIT_SIGNAL, UserError


def add_play(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rl-async play [-n N] [--reward FILE[:FUNCTION]] [--timeout S] [--home] [--url U] RUN -- PROGRAM..."
    parser.description = (
        "Run PROGRAM for each episode of a gateway, in a folder of its own, until the run is over. {prompt} in its "
        "arguments is the task; OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their keys are set. See docs/how-to/gateway.md."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a running run")
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help="the agent program and its arguments, behind --")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="episodes played at once (default: 1)")
    parser.add_argument(
        "--reward",
        default="",
        metavar="FILE[:FUNCTION]",
        help="grades by FUNCTION(workspace, task, stdout), default grade (default: the run's reward.functions)",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="of one episode (default: agent.episode_timeout_s)")
    parser.add_argument("--home", action="store_true", help="give each episode an empty home directory of its own")
    parser.add_argument("--url", default="", help="of the gateway (default: the run's own)")
    parser.set_defaults(command=_play, steady=True)


def _play(arguments: argparse.Namespace) -> int:
    from rl_async.gateway import Gateway
    from rl_async.launcher.play.grading import load_grade
    from rl_async.launcher.play.player import Player
    from rl_async.launcher.play.program import StopPipe, found_program
    from rl_async.launcher.watch.terminal import printable
    from rl_async.process.http_auth import token_file
    from rl_async.process.role import heeded
    from rl_async.process.run_files import gateway_url

    if arguments.n < 1:
        raise UserError(f"play: -n {arguments.n} is not a number of programs")
    program = found_program(arguments.program)
    reward = load_grade(arguments.reward) if arguments.reward else None
    url = arguments.url or gateway_url(arguments.run)
    gateway = Gateway(url, token_file=token_file(arguments.run, "gateway"), wait_s=WAIT_S)
    signals: list[int] = []
    with StopPipe() as stop:

        def on_signal(number: int, _: object) -> None:
            signals.append(number)
            stop.stop()

        for number in heeded(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, on_signal)

        def say(line: str) -> None:
            print(printable(line), flush=True)

        player = Player(
            program, reward, stop, say, timeout_s=arguments.timeout, at_once=arguments.n, own_home=arguments.home
        )
        try:
            player.play(gateway)
        except OSError as error:
            raise UserError(f"play: {error}") from error
    mean = f", mean reward {sum(player.rewards) / len(player.rewards):.3f}" if player.rewards else ""
    print(f"{len(player.rewards)} episodes played{mean}; {player.failed} given back", flush=True)
    return EXIT_SIGNAL + signals[0] if signals else 0


WAIT_S = 2.0  # of one question to the gateway: a request to stop takes effect behind it
