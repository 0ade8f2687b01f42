"""Wrong command lines: for every command, its arguments, a part of what it must say, and its exit status.

They are given in the folder that ``test_command_lines.workplace`` makes: a store of every command (``fl.zarr``, ...),
weights (``a.npz``, ``b.npz``), ``file.txt``, ``folder`` with a file in it, ``foreign.zarr`` that fedstat did not
write, ``photo.png`` that it did not draw, pipes (``pipe.toml``, ...), a link to an endless device, ``endless.png``, and
the files of ``TOML``. ``LONG`` stands for a name of 300 characters.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from training_lines import ATTACK, FIGURES, FL, GRIDS, LEADERBOARD, TABLES
from wrong_files import GRID_TOML, SCALE_TOML, SIM_TOML, TOML, TUNE_TOML


class Line(NamedTuple):
    """One wrong command line."""

    command: str
    argv: list[str]
    says: str
    status: int = 2

    @property
    def name(self) -> str:
        """Of the test."""
        return f"{self.command.rpartition('/')[2]} {shlex.join(self.argv)}"[:90]


def _lines(command: str, rows: str) -> list[Line]:
    """Rows such as ``--p 2 | p must be``."""
    found = []
    for row in filter(str.strip, rows.splitlines()):
        argv, _, rest = row.partition(" | ")
        says, _, status = rest.partition(" | ")
        found.append(Line(command, shlex.split(argv.replace("LONG", "a" * 300)), says.strip(), int(status or 2)))
    return found


def _config(command: str, option: str, rows: dict[str, str], more: str = "") -> list[Line]:
    """A file for every content."""
    found = []
    for content, says in rows.items():
        name = f"{command.rpartition('.')[2]}{len(TOML)}.toml"
        TOML[name] = content
        found.append(Line(command, [option, name, *shlex.split(more)], says))
    return found


# Paths that no command may write to, nor take for a figure.
OUT = """
--out folder | --out folder exists
--out . | exists
--out file.txt | --out file.txt exists
--out file.txt/x | --out file.txt/x cannot be written
--out file.txt/x/y.zarr | file.txt is not a folder
--out foreign.zarr | --out foreign.zarr exists
--out sim.zarr/inner.zarr | which is a store. Choose a path outside of it.
--out sim.zarr/metrics/new/inner.zarr | which is a store. Choose a path outside of it.
--out LONG | cannot be the path of a file: File name too long
"""
PLOT = """
--plot x.xyz | --plot must end in .png, .pdf or .svg, but got x.xyz
--plot x | --plot must end in .png, .pdf or .svg
--plot nowhere/x.png | --plot must be in an existing folder
--plot file.txt/x.png | --plot must be in an existing folder
--plot photo.png | was not drawn by fedstat
--plot folder.png | --plot must be a file, but folder.png is a folder
--plot pipe.png | pipe.png is not a regular file but a pipe or a device
--plot endless.png | endless.png is not a regular file but a pipe or a device
--plot LONG.png | cannot be the path of a file: File name too long
"""
USAGE = """
--no-such-option 1 | unrecognized arguments
--seed | expected one argument
--seed x | invalid int value: 'x'
--seed 1.5 | invalid int value
--seed -1 | seed must be an integer >= 0, but got -1
stray | unrecognized arguments: stray
"""
RESUMED = """
--resume | --resume needs --out
--out folder --resume | --out folder
--out file.txt --resume | --out file.txt
--out foreign.zarr --resume | --out foreign.zarr
--out ntk.zarr --resume | was made by fedstat.ntk, not by
"""
COMPUTE = """
--threads 0 | threads must be an integer >= 1, but got 0
--threads two | invalid int value: 'two'
--client-chunk 0 | client_chunk must be an integer >= 1
--device gpu | device must be a name like 'cpu' or 'cuda:0', but got 'gpu'
--device meta | device must be the CPU or a CUDA device
--device '' | device must be
--device cuda | PyTorch sees no CUDA device
--device cuda:99 | PyTorch sees no CUDA device
"""

SIM = """
--p 1.5 | p must be a finite number in [0, 1], but got 1.5
--p -0.1 | p must be a finite number
--p nan | p must be a finite number
--p 0.5 0.5 | p must hold at least one value and none twice, but got (0.5, 0.5)
--p half | invalid float value: 'half'
--p | expected at least one argument
--alpha 2 | alpha must be a finite number
--methods best | methods must be one of
--methods true true | methods must hold at least one value and none twice
--clients 0 | clients must be an integer >=
--clients 1e3 | invalid int value: '1e3'
--m -1 | m must be an integer
--n-train 0 | n_train must be an integer >= 1
--n-test 0 | n_test must be an integer >= 1
--sigma -1 | sigma must be a finite number in [0, inf), but got -1
--means other | means must be one of
--rounds 0 | rounds must be an integer >= 1, but got 0
--rounds 1000000000000 --out new.zarr | 1,000,000,000,000 rounds are too many: their numbers alone take 8,000,
--local-epochs 0 | local_epochs must be an integer
--batch-size -1 | batch_size must be an integer >= 0, but got -1
--lr 0 | lr must be a finite number in (0
--lr 1e400 | lr must be a finite number
--participation 0 | participation must be
--kappa 0 | kappa must be a finite number in (0, 1], but got 0.0
--tau 1.2 | tau must be
--tau nan | tau must be
--method ml | method must be one of
--replicates 0 | replicates must be an integer
--scale tiny | --scale needs --config
--config nowhere.toml | nowhere.toml cannot be read
--config folder | folder cannot be read
--config pipe.toml | pipe.toml is not a regular file but a pipe or a device
--config LONG | cannot be the path of a file: File name too long
--config deep.toml | nested too deep
--config latin.toml | latin.toml cannot be read
--config bytes.toml | bytes.toml cannot be read
--config broken.toml | broken.toml cannot be read
--config twice.toml | twice.toml cannot be read
--config sim.toml --scale huge | --scale must be one of 'tiny', but got 'huge'
--out motivation.zarr --resume | was made by fedstat.motivation, not by fedstat.sim
--out sim.zarr | --out sim.zarr exists
--out sim.zarr --resume --clients 9 | was started with other settings
--out sim.zarr --resume --replicates 2 --clients 9 | was started with other settings
--out sim.zarr --resume --rounds 2 | has runs of 1 rounds, and a study stores no states
"""
RECOVERY = """
--p 1 | p
--p 0 | p
--p 2 | p must be
--p nan | p must be
--p 0.5 0.5 | p
--p x | invalid float value
--alpha 3 | alpha must be
--kappa 0 | kappa must be
--kappa 1.5 | kappa must be
--methods nope | methods must be one of
--methods pa pa | methods
--clients 0 | clients must be
--d 0 | d must be
--m 1 | m
--replicates 0 | replicates must be an integer >= 1
--replicates x | invalid int value
--out recovery.zarr | --out recovery.zarr exists
--out sim.zarr --overwrite | was made by fedstat.sim, not by fedstat.sim.recovery
--out folder --overwrite | --out folder
--spectrum x.xyz | --spectrum must end in .png, .pdf or .svg, but got x.xyz
--spectrum photo.png | was not drawn by fedstat
--spectrum new.png --plot new.png | --plot and --spectrum must be different files
--clients 1 | needs at least 2 clients and 2 covariates
"""
MOTIVATION = """
--clients 7 | clients must be an integer >= 8, but got 7
--clients 9 --cases one-class --out new.zarr | clients must be an integer from 10
--data mnits | Did you mean 'mnist'
--data ag-news --data-dir nowhere | AG News needs
--data mnist --data-dir nowhere | MNIST needs
--data mnist --data-dir file.txt | MNIST needs
--cases one | cases must be one of
--cases iid iid | cases must hold at least one value and none twice
--hidden 0 | hidden must be an integer
--local-epochs 0 | local_epochs must be
--batch-size 0 | batch_size must be
--lr 0 | lr must be
--mean inf | mean must be a finite number in (-inf, inf), but got inf
--sd 0 | sd must be
--common-samples 0 | common_samples must be
--k 0 | k must be
--kappa 2 | kappa must be
--replicates 1 | replicates must be an integer >= 2, but got 1
--outputs all | invalid choice: 'all'
--clients 100000 --out new.zarr | clients
--clients 9 --out new.zarr | clients must be an integer from 10 to 1797
--out sim.zarr --resume | was made by fedstat.sim, not by fedstat.motivation
--out motivation.zarr | --out motivation.zarr exists
--out motivation.zarr --resume --hidden 9 | was started with other settings
"""
NTK = """
--data nowhere.zarr | an existing zarr store, but got 'nowhere.zarr'
--data file.txt | file.txt
--data folder | folder
--data sim.zarr | sim.zarr
--data fl.zarr | fl.zarr
--data ntk.zarr | ntk.zarr
--data foreign.zarr | foreign.zarr
--data '' | data must be
--partition two | partition must be one of
--theorem 3 | theorem must be one of 1, 2, but got 3
--clients 0 | clients must be an integer >= 1
--clients 2 3 | theorem 1 takes one --clients
--n 0 | n must be an integer >= 1
--n 2 3 | theorem 1 takes one --clients and one --n
--n-test -1 | n_test must be an integer >= 0
--d 0 | d must be an integer >= 1
--widths 8 0 | widths must be an integer >= 1, but got 0
--widths | expected at least one argument
--widths 8 8 | widths must hold at least one value and none twice, but got (8, 8)
--methods fedavg fedavg | methods must hold at least one value and none twice
--clients 4 4 | clients must hold at least one value and none twice
--theorem 2 --clients 4 4 | clients must hold at least one value and none twice
--theorem 2 --n 4 4 | n must hold at least one value and none twice
--methods none | methods must be one of
--rounds 0 | rounds must be
--local-steps 0 | local_steps must be
--lr fast | lr must be 'stable', 'theorem' or a number, but got 'fast'
--lr 0 | lr
--lr nan | lr
--server-lr 0 | server_lr
--reduction max | reduction must be one of
--replicates 0 | replicates must be
--kappa 0 --methods dynamic | kappa must be
--theorem 2 --kappa 0.5 | --kappa is for theorem 1 only, but got 0.5. Remove it
--theorem 2 --device cpu | --device is for theorem 1 only
--init-scale 0.2 | --init-scale is for theorem 2 only
--data digits --d 5 | --d is for --data gaussian only
--partition iid | --partition is for --data digits only
--theorem 2 --constant nan | constant
--theorem 2 --delta 0 | delta
--theorem 2 --delta 1 | delta
--theorem 2 --init-scale 0 | init_scale
--data digits --clients 1000 | 1797 digits (about 178 per class) gives
--device cuda | CUDA
--device gpu | device
--out ntk.zarr | --out ntk.zarr exists
--out sim.zarr --overwrite | was made by fedstat.sim, not by fedstat.ntk
--out folder --overwrite | --out folder
"""
DATA = """
 | the following arguments are required: ACTION
get | ACTION must be one of 'list', 'fetch', but got 'get'
fetch | fetch needs the NAME of at least one data set: digits, mnist
fetch mnits | Did you mean 'mnist'
fetch LONG | NAME must be one of
list own.csv | NAME must be one of
list --overwrite | --overwrite has no effect with list
fetch svhn --data-dir file.txt | the data folder must be a folder, but file.txt is a file
"""
DECOMPOSE = """
 | the following arguments are required: FILE
a.npz nowhere.npz | there is no file nowhere.npz
a.npz folder | the folder folder holds no files of clients
a.npz file.txt | file.txt must end in .pt
a.npz bad.npz | bad.npz could not be read
a.npz pipe.npz | pipe.npz is not a regular file but a pipe or a device
a.npz LONG.npz | cannot be the path of a file: File name too long
a.npz bad.pt | bad.pt could not be read
a.npz bad.safetensors | bad.safetensors could not be read
a.npz fl.zarr | fl.zarr is a run, which holds all its clients
split.zarr | the run must hold weights, but has result, split
a.npz b.npz --layer fcl | has no layer 'fcl', only fc1. Did you mean
a.npz b.npz --layer conv* | has no layer that matches 'conv*', only fc1
a.npz b.npz --checkpoint 1 | layer 'fc1' has no dim checkpoint, but got checkpoint=1
a.npz b.npz --baseline nowhere.npz | there is no file nowhere.npz
a.npz b.npz --layer fc1 fc1 | layer must hold at least one value and none twice
a.npz b.npz --layer | expected at least one argument
a.npz b.npz --kappa 1.5 | kappa must be
a.npz b.npz --kappa x | invalid float value
a.npz b.npz --n-factors 0 | n_factors
a.npz b.npz --n-factors 1000 | n_factors
a.npz b.npz --tau 2 | must be a quantile in (0, 1), inf, -inf or abs:X, but got '2'
a.npz b.npz --tau abs:nan | abs
a.npz b.npz --tau abs: | abs
a.npz b.npz --tau nan | --tau
a.npz b.npz --tau x | --tau
a.npz b.npz --method ml | method must be one of
a.npz b.npz --init none | init must be one of 'pc', 'smc', but got 'none'
a.npz b.npz --n-starts 0 | n_starts must be an integer >= 1, but got 0
a.npz b.npz --n-boot -1 | n_boot must be an integer >= 0, but got -1
a.npz b.npz --n-boot 4 --method icc | fedstat.icc(weights, n_boot=B)
a.npz b.npz --n-permutations -1 | n_permutations must be
a.npz b.npz --sensitivity --n-factors 1 | Remove --n-factors
a.npz b.npz --csv file.txt | was not written by fedstat
a.npz b.npz --csv . | --csv must be a file
a.npz b.npz --latex folder | --latex must be a file
a.npz b.npz --seed -1 | seed
a.npz b.npz --seed x | invalid int value
a.npz b.npz --no-such | unrecognized arguments
a.npz b.npz --over | unrecognized arguments: --over
a.npz b.npz --out sim.zarr --overwrite | was made by fedstat.sim, not by fedstat.decompose
a.npz b.npz --out split.zarr | --out split.zarr exists
a.npz b.npz --out folder --overwrite | --out folder
"""

LINES = [
    *_lines("fedstat", "stray | COMMAND must be one of 'decompose', 'data', 'fl'\nverify | required: RUN\n"
            "simm --p 0.5 | but got 'simm'. Did you mean 'sim'\n"
            "verify nowhere | there is no run at nowhere\nverify file.txt | there is no run at file.txt\n"
            "verify folder | there is no run at folder\n"
            "verify LONG | cannot be the path of a file\n"
            "verify sim.zarr sim.zarr | the run sim.zarr is named twice. Name it once\n"
            "verify grid grid/fl.zarr | the run grid/fl.zarr is named twice\n"
            "report sim.zarr sim.zarr --out new.html | the run sim.zarr is named twice\n"
            "report fl.zarr . --out new.html | the run fl.zarr is named twice\n"
            "report sim.zarr others/sim.zarr --out new.html | is named twice, as sim.zarr and as others/sim.zarr"),
    *(line._replace(argv=["leaderboard", *line.argv]) for line in _lines("fedstat", LEADERBOARD + PLOT)),
    *_lines("fedstat.sim", SIM + OUT + PLOT + USAGE + RESUMED + COMPUTE),
    *_config("fedstat.sim", "--config", SIM_TOML),
    *_lines("fedstat.sim.recovery", RECOVERY + OUT + PLOT + USAGE),
    *_lines("fedstat.motivation", MOTIVATION + OUT + PLOT + USAGE + RESUMED + COMPUTE),
    *_lines("fedstat.ntk", NTK + OUT + USAGE),
    *_lines("fedstat.data", DATA),
    *_lines("fedstat.decompose", DECOMPOSE),
    *(line._replace(argv=["a.npz", "b.npz", *line.argv]) for line in _lines("fedstat.decompose", OUT + PLOT)),
    *(line._replace(argv=["fl.zarr", *line.argv]) for line in _lines("fedstat.attack", ATTACK + OUT + PLOT + COMPUTE)),
    *_lines("fedstat.attack", "nowhere | there is no run at nowhere\nsim.zarr | must be a store of fedstat.fl\n"
            "fl.zarr fl.zarr | runs must hold at least one value and none twice"),
    *_lines("fedstat.fl", FL + OUT + USAGE + RESUMED + COMPUTE),
    *_config("fedstat.fl", "--config", GRID_TOML, "--data-dir nowhere"),
    *_config("fedstat.fl", "--config", SCALE_TOML, "--scale quick"),
    *_config("fedstat.fl", "--config", TUNE_TOML, "--tune"),
    *(
        line._replace(argv=["fedfac", f"table{n}", *line.argv])
        for n in (2, 5, 8)
        for line in _lines("analysis/tables.py", TABLES)
    ),
    *_lines("analysis/tables.py", "fedfac | required: table\nfedfac table9 | invalid choice\nx t | invalid choice"),
    *_lines("analysis/fedfac/decomposition.py", "--runs nowhere | there is no run\n"
            "--runs grid --replicates x | invalid int value\n--runs grid --out file.txt/t | --out"),
    *_lines("analysis/sim_table.py", "nowhere.zarr t.csv | there is no run at nowhere.zarr\nsim.zarr | required: csv\n"
            "sim.zarr nowhere/t.csv | csv must be in an existing folder\nfile.txt t.csv | there is no run at file.txt\n"
            "fl.zarr t.csv | fl.zarr must be a store of fedstat.sim, but is one of fedstat.fl\n"
            "foreign.zarr t.csv | the run at foreign.zarr\nsim.zarr folder | csv must be a file"),
    *(line for n in ("01", "02") for line in _lines(f"paper_figs/fig{n}.py", FIGURES +
      "--runs nowhere --out x.png | there is no run at\n--data sim --runs swapped --out x.png | must be a store")),
    *(line for n in ("06", "07") for line in _lines(f"paper_figs/fig{n}.py", FIGURES +
      "--runs nowhere --out x.png | there is no run at\n--scale swapped --runs swapped --out x.png | must be a store")),
    *(line for n in ("08", "09", "10") for line in _lines(f"paper_figs/fig{n}.py", FIGURES + GRIDS)),
    *_lines("paper_figs/fig08.py", "--runs others --out x.png | others/sim.zarr"),
    *_lines("paper_figs/fig09.py", "--runs others --out x.png | others/sim.zarr\n"
            "--runs grid --methods fedrep --out x.png | no finished run meets"),
    *_lines("paper_figs/fig10.py", "--runs grid --client x --out x.png | invalid int value\n"
            "--runs grid --out x.png | no run of FedFac in which"),
    *(line for name in ("convergence", "generalization") for line in _lines(f"paper_figs/theory_{name}.py", FIGURES +
      "--scale tiny --out x.png | invalid choice\n--runs file.txt --out x.png | file.txt")),
]  # fmt: skip
