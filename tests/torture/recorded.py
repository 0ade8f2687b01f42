"""A process whose changes to files are recorded: ``python recorded.py JOB OUT LOG``."""

import pickle
import sys
from pathlib import Path

import disk
import jobs
import xarray as xr

from fedstat import store
from fedstat.store import Writer

JOBS = jobs.STREAMED | {"replaced": jobs.replaced}

if __name__ == "__main__":
    name, out, to = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    jobs.at_every_turn()
    if name == "replaced":
        store.save(out, xr.DataTree.from_dict({"/a": jobs.RESULT}), store.provenance("first", {}, command="made up"))
    log: list[disk.Operation] = []
    disk.watch(out.parent, log.append)
    commit = Writer.commit

    def marked(writer: Writer) -> None:
        commit(writer)
        log.append(disk.Operation("mark", number=jobs.held(writer)))

    Writer.commit = marked
    JOBS[name](out)
    to.write_bytes(pickle.dumps(log))
