"""Commands on a run's copy on S3: upload, verify, restore."""

import argparse
import re
import time

from dfexp import control, generate, params, store
from dfexp.cli.common import EXIT_FAILED, EXIT_OK, find_run, opened, say, told
from dfexp.errors import ParamsError, RunError
from dfexp.generate.events import EventLog
from dfexp.generate.verdicts import tally
from dfexp.layout import RunFolder, project_root
from dfexp.params import StoreGroup
from dfexp.store.bucket import Bucket

_URL = re.compile(r"s3://([^/]+)/(?:(.+)/)?([^/]+)/?")


def _uploaded_run(text: str) -> tuple[RunFolder, StoreGroup]:
    folder = find_run(text)
    group = generate.read_spec(folder).store
    if group.bucket is None:
        raise RunError(f"run {folder.name!r} has no store: its parameters name no store.bucket.")
    return folder, group


def upload(args: argparse.Namespace) -> int:
    """`dfexp store upload RUN`: whatever of a run that has ended or was stopped is not in the bucket yet."""
    folder, group = _uploaded_run(args.run)
    if control.going_on(folder) is not None:
        raise RunError(f"run {folder.name!r} is running, and uploads by itself. To stop it: dfexp stop {folder.name}.")
    return EXIT_FAILED if any(bring(folder, group)) else EXIT_OK


def bring(folder: RunFolder, group: StoreGroup) -> tuple[int, int]:
    """Upload what is not there yet, and compare: how many objects are left, and how many things differ then; tells."""
    with opened(folder) as shards, EventLog(folder.events) as events:
        shards.seal()
        uploads, said = store.Uploader(folder, group, shards, events.record), 0.0
        while not uploads.wait(1.0):
            if time.monotonic() > said + 10.0:
                say(f"  {time.strftime('%H:%M:%S')} {len(uploads.left):,} object(s) left  {uploads.why}".rstrip())
                said = time.monotonic()
        left = uploads.finish(0.0)
    if found := control.read_status(folder):  # by which the next start knows whether something is left
        control.write_status(folder, {**found, "not_uploaded": len(left)})
    if left:
        return told(f"{len(left):,} object(s) are not on S3, from {left[0]}: {uploads.why}", len(left)), 0
    return 0, _verified(folder, group)


def verify(args: argparse.Namespace) -> int:
    """`dfexp store verify RUN`: the bucket beside the run's folder, both ways."""
    return EXIT_FAILED if _verified(*_uploaded_run(args.run)) else EXIT_OK


def _verified(folder: RunFolder, group: StoreGroup) -> int:
    """Print what differs. Returns how many things do."""
    verdict = store.verify(folder, group)
    print("\n".join([*verdict.problems, f"{verdict.url}: {verdict.shards:,} shard(s), {verdict.bytes:,} bytes agree"]))
    return told(f"{count:,} thing(s) differ", count) if (count := len(verdict.problems)) else 0


def restore(args: argparse.Namespace) -> None:
    """`dfexp store restore RUN`: the folder of a run from its bucket alone, and with --rows its shards too."""
    root, name = project_root(), args.run
    if args.source or args.params:
        tree = params.read_yaml(args.params).get("store") or {} if args.params else {}
        if args.source:
            match = _URL.fullmatch(args.source)
            if match is None or match[3] != name:
                raise ParamsError(f"--from {args.source}: it has to be s3://BUCKET/PREFIX/{name}, with the run's name.")
            tree = {**tree, "bucket": match[1], "prefix": match[2] or ""}
        group = params.checked("store", StoreGroup, params.overlay({"store": tree}, args.set)["store"])
        say(f"looking in bucket {group.bucket} at {Bucket(group, name).endpoint} ...")
        made = store.restore(name, group, root)
        say(f"{made.folder.path}: {made.rows:,} of {made.asked:,} rows are done, in {made.shards:,} shard(s) on S3")
        for each in made.unread:
            say(f"  {each} is there and not of this run, so its rows do not count")
        if made.writer:
            say(f"  still written by {made.writer}. Stop that run before this one goes on.")
    elif not args.rows:
        raise ParamsError("say from where: --from s3://BUCKET/PREFIX/RUN, or --params FILE with a store group.")
    folder, group = _uploaded_run(name)
    if args.rows:
        say(f"{store.fetch_rows(folder, group):,} shard(s) downloaded to {folder.completions}")
    done, failed, asked = generate.kept(folder)
    rows = "" if args.rows else f"Its rows: dfexp store restore {name} --rows. "
    is_over = f"Nothing is left to do: {tally(done, failed, asked)}. {rows}Its report: dfexp report {name}"
    say(is_over if done + failed == asked else f"The run goes on with: dfexp resume {name}")
