"""Scripts are worked out as a shell would, but for what only a running machine knows, which stays marked."""

import shutil
import subprocess

import pytest

from rl_async.configs.importing.shell import is_unknown, read_script
from rl_async.errors import ConfigError


def words(script: str) -> list[str]:
    """The words of the command `show` in a script."""
    (found,) = [command for command in read_script(script, "run.sh").commands if command[0] == "show"]
    return found[1:]


# Without anything that a machine decides, so that bash itself is the oracle.
SCRIPTS = {
    "variables": 'A=1; B="x $A y"; show $A "$B" $B ${A}b \'$A\' "a"\'b\'c',
    "defaults": 'E=; show ${A:-1} ${E:-2} "${E-3}" ${F:=4} $F ${A:+no}${F:+yes} ${A-"q r"}',
    "nested defaults": 'D=${D:-"${ROOT:-/r}/d"}; show ${D} "${X:-${Y:-$D}}"',
    "arrays": 'A=(a "b c" # none\n  --d e\n); A+=(f); N=(); show "${A[@]}" ${A[@]} "${N[@]}" ${N[@]} x"${A[0]}"',
    "length of an array": 'A=(a "b c"); show ${#A[@]}',
    "words of a variable": 'M=" a  b\nc "; show x${M}y $M "$M"',
    "arithmetic": "A=3; B=$((A * 2 + 1)); show $((B / 2)) $(( (A + 5) % 3 )) $((-7 / 2)) $((A > 2))",
    "trimming": "A=/m/Qwen3-8B.tar; show ${A##*/} ${A%.*} ${A#/} ${A/8B/4B} ${A%%-*}",
    "case": "D=gpu; case $D in cpu) N=1 ;; gpu | tpu) N=8 ;; *) N=9 ;; esac; show $N",
    "if": 'if [ "$A" = 1 ]; then B=1; elif [[ -z $A && x == x* ]]; then B=2; else B=3; fi; show $B',
    "nested if": "A=2; if [ $A -gt 1 ]; then if ! [ $A -eq 3 ]; then B=in; fi; else B=out; fi; show $B",
    "and, or": 'A=1; [ $A = 1 ] && B=y || B=n; [ $A = 2 ] && C=y || C=n; [ -n "$Z" ] || D=d; show $B $C $D',
    "for": "L=; for n in 1 2 3; do L+=$n; done; show $L",
    "export": 'export A=1 B="2 3"; show $A "$B"',
    "continuation": "show a \\\n  b \\\n  c",
    "quotes over lines": 'J="{\n \\"a\\": 1 }"; show "$J" b',
    "comments": "show a#b # c",
    "redirections": "show a 2>/dev/null b >/dev/null",
    "here-document": "true <<EOF\nshow not this\nEOF\nshow this",
    "functions": "f() {\n  A=2\n}\nA=1\nshow $A",
    "groups": "A=1; if [ $A = 1 ] && { [ $A = 2 ] || [ $A = 1 ]; }; then B=g; fi; show $B",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_worked_out_as_bash_does(name: str) -> None:
    bash = shutil.which("bash")
    assert bash, "the oracle of this test"
    printing = "show() { printf '%s\\0' \"$@\" >&3; }\nexec 3>&1\n"
    ran = subprocess.run([bash, "-c", printing + SCRIPTS[name]], capture_output=True, text=True, env={}, check=True)
    assert words(SCRIPTS[name]) == ran.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("show $HOME/d ${HOME}/d $(nproc) `id`", ["$HOME/d", "${HOME}/d", "$(nproc)", "`id`"]),
        ("show $KEY ${KEY}", ["$KEY", "${KEY}"]),
        ('show a "$@" ${MORE[@]} $*', ["a"]),
        ("D=${D:-$(python3 -c 'import npu' && echo npu || echo gpu)}; show $D", ["gpu"]),
        ("N=$(nproc); N=${N:-4}; if [ -z $N ] || [ $N -le 0 ]; then N=8; fi; show $N", ["8"]),
        ("if command -v x; then N=$(x); else N=0; fi; show $N", ["0"]),
        ('if [ -z "$KEY" ]; then echo "set KEY"; exit 1; fi; show a', ["a"]),
        ("show a\n  --b 1\n", ["a", "--b", "1"]),
        ("show a \\\n # why \n data.x=1\n", ["a", "data.x=1"]),
        ("echo engine=trt is for show only; show a", ["a"]),
        ("if grep x y; then show a; fi", ["a"]),
    ],
)
def test_what_only_a_machine_knows_stays_or_is_assumed(script: str, expected: list[str]) -> None:
    assert words(script) == expected
    assert all(is_unknown(word) == ("$" in word or "`" in word) for word in expected)


def test_what_is_assumed_is_said() -> None:
    assert read_script("N=$(nproc); if [ $N -gt 1 ]; then M=2; fi", "s").assumed
    assert not read_script("N=3; if [ $N -gt 1 ]; then M=2; fi", "s").assumed


@pytest.mark.parametrize(
    "script",
    [
        "A=xxxxxxxx\n" + "A=$A$A$A$A\n" * 60 + "show $A",
        "A=(x x x x)\n" + 'A+=("${A[@]}" "${A[@]}" "${A[@]}")\n' * 60 + 'show "${A[@]}"',
        "A=" + "x" * 60_000 + "\n" + "B=$A\n" * 200 + "show",
    ],
)
def test_a_script_that_grows_without_bounds_is_refused(script: str) -> None:
    with pytest.raises(ConfigError):
        read_script(script, "run.sh")


@pytest.mark.parametrize(
    "script", ["if", "case", "case x in", "for", "((", '"', "'", "$(", "${", "fi fi", ")", "A=(", "<<E", "[["]
)
def test_what_is_cut_off_ends(script: str) -> None:
    assert read_script(f"show a\n{script}", "run.sh").commands[0] == ["show", "a"]
