"""A run that commits and says on stdout which rows are safe, until it is killed or nothing is pending.

Arguments: folder, total, rows per shard, seed. One line a commit, written only after it returned.
"""

import random
import sys
from pathlib import Path

from tests.shards.support import failure, open_run, rows


def main() -> None:
    folder, total, rows_per_shard, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    choose = random.Random(seed)
    with open_run(folder, total=total, rows_per_shard=rows_per_shard) as run:
        print("open", flush=True)
        pending = list(run.pending())
        choose.shuffle(pending)
        while pending:
            batch = [pending.pop() for _ in range(min(len(pending), choose.randint(1, 12)))]
            failed = [index for index in batch if index % 50 == 49]
            run.commit(rows(index for index in batch if index % 50 != 49), [failure(index) for index in failed])
            print(*batch, flush=True)
            if choose.random() < 0.05:
                run.seal()
        run.seal()


main()
