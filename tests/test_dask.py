"""The backward pass over Dask arrays: the bits of one call, laziness, errors, a cluster that loses a worker."""

import contextlib
import doctest
import functools
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import simulation
from strategies import Inputs, assert_same_bits, make_inputs, plain_call

import lstmcell_bwd
from lstmcell_bwd import BIAS_LEAF_ROWS, LSTMCellGradients, lstm_cell_backward

for name in ("dask", "distributed"):
    pytest.importorskip(name, reason="dask is not installed")

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import distributed  # noqa: E402
from dask.callbacks import Callback  # noqa: E402

import lstmcell_bwd.dask  # noqa: E402

# At the end: the package under test is the installed one.
sys.path.append(str(Path(__file__).resolve().parents[1]))

L = BIAS_LEAF_ROWS
# Missing gradients, has_bias.
PATTERNS = list(itertools.product([(), ("grad_hy",), ("grad_cy",), ("grad_hy", "grad_cy")], [True, False]))


def chunked(inputs, rows):
    """Return the arrays of a call as dask arrays; `rows` is the size of the chunks of the batch, or all their sizes."""
    return inputs._replace(
        **{
            name: da.from_array(array, chunks=(rows, -1))
            for name, array in inputs._asdict().items()
            if array is not None
        }
    )


def computed(gradients, **options):
    """Compute the three results together."""
    return LSTMCellGradients(*dask.compute(*gradients, **options))


def cut(rows, cuts):
    """Return the sizes of chunks that end at the given rows."""
    return tuple(last - first for first, last in itertools.pairwise([0, *cuts, rows]))


class Executed(Callback):
    """Counts the tasks that a scheduler of this process runs, by the name before the hash."""

    def __init__(self):
        self.tasks = Counter()
        super().__init__(pretask=self.count)

    def count(self, key, *_):
        self.tasks[dask.utils.key_split(key)] += 1


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_every_aligned_chunking(dtype, scheduler):
    rows = 4 * L + 3
    inputs = make_inputs(rows, 5, dtype, seed=1, kind="scaled")
    expected = plain_call(inputs)
    aligned = range(L, rows, L)
    for cuts in itertools.chain.from_iterable(itertools.combinations(aligned, n) for n in range(5)):
        chunks = cut(rows, cuts)
        gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, chunks))
        assert gradients.grad_cx.chunks == (chunks, (5,))
        assert_same_bits(computed(gradients, scheduler=scheduler), expected)


@pytest.mark.parametrize("num_threads", [1, 3, None])
def test_one_leaf_per_chunk(backend, num_threads):
    inputs = make_inputs(23 * L - 5, 9, backend, seed=2, kind="scaled")
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, L), num_threads=num_threads)
    assert_same_bits(computed(gradients, scheduler="threads", num_workers=4), plain_call(inputs))


@pytest.mark.parametrize(("missing", "has_bias"), PATTERNS)
def test_missing_gradients_and_bias(missing, has_bias):
    inputs = make_inputs(3 * L, 7, seed=3)._replace(**dict.fromkeys(missing))
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, L), has_bias)
    assert (gradients.grad_bias is None) == (not has_bias)
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(inputs, has_bias))


@pytest.mark.parametrize("nonfinite", ["nan", "ieee"])
def test_nonfinite(nonfinite):
    inputs = make_inputs(3 * L, 7, seed=4)
    inputs.cy[L + 1, 3] = np.inf
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, L), nonfinite=nonfinite)
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(inputs, nonfinite=nonfinite))


@pytest.mark.parametrize("field", ["grad_hy", "grad_cy", "cx", "cy", "gates"])
def test_one_dask_array_among_numpy_arrays(dtype, field):
    inputs = make_inputs(3 * L + 1, 4, dtype, seed=5)
    mixed = inputs._replace(**{field: getattr(chunked(inputs, (L, 0, 2 * L, 1)), field)})
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*mixed)
    assert gradients.grad_gates.chunks == ((L, 0, 2 * L, 1), (16,))
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(inputs))


def test_one_array_in_several_places():
    x = da.from_array(make_inputs(2 * L, 5, seed=12).cx, chunks=(L, -1))
    arrays = Inputs(x, x, x, x, da.concatenate([x, x, x, x], axis=1).rechunk((L, -1)))
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*arrays)
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(Inputs(*dask.compute(*arrays))))


def test_other_layouts_byte_orders_and_lists():
    inputs = make_inputs(2 * L, 6, np.float64, seed=6)
    arrays = chunked(inputs, L)
    gradients = lstmcell_bwd.dask.lstm_cell_backward(
        da.from_array(np.asfortranarray(inputs.grad_hy), chunks=(L, -1)),
        inputs.grad_cy.tolist(),
        arrays.cx.astype(">f8"),
        inputs.cy.astype(">f8"),
        arrays.gates[::-1][::-1],
    )
    assert all(x.dtype == np.float64 and x.dtype.isnative for x in gradients)
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(inputs))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_empty(dtype, shape, has_bias):
    inputs = make_inputs(*shape, dtype)
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, -1), has_bias)
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(inputs, has_bias))


@pytest.mark.parametrize("rows", [(L, 0, L, 4), (0, 2 * L, 4), (2 * L, 4, 0)], ids=str)
def test_chunks_without_rows(rows):
    inputs = make_inputs(2 * L + 4, 3, seed=7)
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, rows))
    assert gradients.grad_cx.chunks[0] == rows
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(inputs))


# ---- laziness -------------------------------------------------------------------------------------------------------


def test_nothing_is_computed_before_it_is_asked_for(dtype):
    """Chunks that cannot be computed: shapes, chunks, dtypes and metas are known all the same."""

    def never(block):
        raise AssertionError("computed")

    arrays = chunked(make_inputs(3 * L, 5, dtype), L)
    arrays = arrays._replace(**{k: x.map_blocks(never, meta=x._meta) for k, x in arrays._asdict().items()})
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*arrays)
    assert type(gradients) is LSTMCellGradients
    assert [x.chunks for x in gradients] == [((L, L, L), (20,)), ((L, L, L), (5,)), ((20,),)]
    for array in gradients:
        assert isinstance(array, da.Array)
        assert array.dtype == array._meta.dtype == dtype
        assert type(array._meta) is np.ndarray
        assert array._meta.ndim == array.ndim
        with pytest.raises(AssertionError, match="computed"):
            array.compute(scheduler="sync")


@pytest.mark.parametrize(
    "wanted",
    [
        lambda a, b, c: (a, b, c),
        lambda a, b, c: (a.sum(), b + 1, c * 2),
        lambda a, b, c: (a, b),
        lambda a, b, c: (c,),
        lambda a, b, c: (b,),
    ],
    ids=["all", "consumed", "two", "bias", "state"],
)
def test_the_kernel_runs_once_for_each_chunk(monkeypatch, wanted):
    """What feeds a chunk is part of its task; the bias alone does not make one task of all chunks."""
    runs = []

    def counted(*arrays, first_row, **options):
        runs.append(first_row)
        return lstmcell_bwd.lstm_cell_backward_part(*arrays, first_row=first_row, **options)

    monkeypatch.setattr(lstmcell_bwd.dask, "lstm_cell_backward_part", counted)
    arrays = chunked(make_inputs(6 * L, 5), L)
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*(-x for x in arrays))
    with Executed() as executed:
        dask.compute(*wanted(*gradients), scheduler="sync")
    assert sorted(runs) == list(range(0, 6 * L, L))
    assert not {"neg", "negative"} & set(executed.tasks)
    runs.clear()
    dask.persist(*wanted(*gradients), scheduler="sync")
    assert len(runs) == 6


def test_tasks_of_a_graph():
    """For each chunk one kernel task and three that take a result out of it; one that adds up the bias."""
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(make_inputs(6 * L, 5), L))
    with Executed() as executed:
        computed(gradients, scheduler="sync")
    of_chunks = ("backward_of", "grad_gates_of", "grad_cx_of", "bias_parts_of")
    assert {name: executed.tasks[name] for name in (*of_chunks, "grad_bias_of")} == {
        **dict.fromkeys(of_chunks, 6),
        "grad_bias_of": 1,
    }


def test_bias_of_many_chunks_is_exchanged_as_parts():
    """What travels to the last task is the nodes of the bias tree, not the gradients."""
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*chunked(make_inputs(8 * L, 5), 2 * L))
    (name,) = {key[0] for key in gradients.grad_bias.dask.to_dict() if dask.utils.key_split(key) == "bias_parts_of"}
    graph = gradients.grad_bias.dask
    blocks = dask.get(graph, [(name, k, 0) for k in range(4)])
    nodes = [node for block in blocks for node in block]
    assert [(node.first_leaf, node.level, node.rows) for node in nodes] == [(2 * k, 1, 2 * L) for k in range(4)]


@pytest.mark.parametrize(("given", "passed"), [({}, 1), ({"num_threads": 3}, 3), ({"num_threads": None}, None)])
def test_threads_of_a_task(monkeypatch, given, passed):
    """One by default: the scheduler already runs as many tasks at once as it may use threads."""
    seen = []

    def noted(*arrays, num_threads, **options):
        seen.append(num_threads)
        return lstmcell_bwd.lstm_cell_backward_part(*arrays, num_threads=num_threads, **options)

    monkeypatch.setattr(lstmcell_bwd.dask, "lstm_cell_backward_part", noted)
    computed(lstmcell_bwd.dask.lstm_cell_backward(*chunked(make_inputs(2 * L, 5), L), **given), scheduler="sync")
    assert seen == [passed, passed]


# ---- chunks that do not fit -----------------------------------------------------------------------------------------

RECHUNKED = {
    "smaller than a leaf": ((10,) * 10, (L, L, 100 - 2 * L)),
    "out of step": ((40, 40, 20), (L, L, 100 - 2 * L)),
    "one row too many": ((L + 1, 99 - L), (L, 100 - L)),
    "in one": ((100,), (100,)),
    "short last": ((96, 1, 3), (96, 4)),
    "without rows": ((0, 64, 0, 36, 0), (64, 36)),
}


@pytest.mark.parametrize("case", RECHUNKED)
def test_rechunked_on_request(case):
    rows, expected = RECHUNKED[case]
    inputs = make_inputs(100, 6, seed=8)
    arrays = chunked(inputs, rows)
    arrays = arrays._replace(
        cy=arrays.cy.rechunk((50, 4)), gates=arrays.gates.rechunk((-1, 5)), grad_hy=inputs.grad_hy, grad_cy=None
    )
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*arrays, rechunk=True)
    assert gradients.grad_gates.chunks == (expected, (24,))
    assert_same_bits(computed(gradients, scheduler="sync"), plain_call(inputs._replace(grad_cy=None)))


@pytest.mark.parametrize("size", [1, L - 1, L + 1, 100])
def test_chunks_out_of_step(size):
    """The message says a size that fits."""
    arrays = chunked(make_inputs(250, 6), size)
    right = -(-size // L) * L
    message = (
        rf"`cx` must have chunks along the batch that end at multiples of BIAS_LEAF_ROWS = {L}, like chunks of "
        rf"{right} \(`rechunk=True` sees to it\), got chunks of \({size}, "
    )
    with pytest.raises(lstmcell_bwd.InvalidParameterError, match=message) as caught:
        lstmcell_bwd.dask.lstm_cell_backward(*arrays)
    assert len(str(caught.value)) < 250
    lstmcell_bwd.dask.lstm_cell_backward(*(x.rechunk((right, -1)) for x in arrays))


@pytest.mark.parametrize("field", ["cy", "gates", "grad_hy", "grad_cy"])
def test_chunks_of_two_arrays_differ(field):
    arrays = chunked(make_inputs(4 * L, 6), L)
    arrays = arrays._replace(**{field: getattr(arrays, field).rechunk((2 * L, -1))})
    message = rf"`{field}` must have the chunks of `cx` along the batch, .* got chunks of \({2 * L}, {2 * L}\)"
    with pytest.raises(lstmcell_bwd.InvalidParameterError, match=message):
        lstmcell_bwd.dask.lstm_cell_backward(*arrays)


@pytest.mark.parametrize("field", ["cx", "cy", "gates", "grad_hy", "grad_cy"])
def test_rows_in_several_chunks(field):
    arrays = chunked(make_inputs(2 * L, 6), L)
    arrays = arrays._replace(**{field: getattr(arrays, field).rechunk((L, 4))})
    message = rf"`{field}` must have all columns in one chunk .* got chunks of \(4, "
    with pytest.raises(lstmcell_bwd.InvalidParameterError, match=message):
        lstmcell_bwd.dask.lstm_cell_backward(*arrays)


@pytest.mark.parametrize("rechunk", [False, True])
@pytest.mark.parametrize("field", ["cx", "cy", "gates", "grad_hy", "grad_cy"])
def test_unknown_sizes_of_chunks(field, rechunk):
    arrays = chunked(make_inputs(2 * L, 6), L)
    array = getattr(arrays, field)
    arrays = arrays._replace(**{field: array[da.from_array(np.ones(2 * L, bool), chunks=L)]})
    message = rf"`{field}` must have chunks of known sizes .*compute_chunk_sizes.* got \(nan, {array.shape[1]}\)"
    with pytest.raises(lstmcell_bwd.InvalidParameterError, match=message):
        lstmcell_bwd.dask.lstm_cell_backward(*arrays, rechunk=rechunk)
    getattr(arrays, field).compute_chunk_sizes()
    lstmcell_bwd.dask.lstm_cell_backward(*arrays, rechunk=rechunk)


# ---- other arguments ------------------------------------------------------------------------------------------------

# What is changed of a good call; the package's own function must refuse the same with the same words.
WRONG = {
    "cx missing": {"cx": None},
    "cy missing": {"cy": None},
    "gates missing": {"gates": None},
    "rank": {"cx": np.zeros(2 * L, np.float32)},
    "three axes": {"grad_cy": np.zeros((2 * L, 6, 1), np.float32)},
    "rows": {"cy": np.zeros((2 * L + 1, 6), np.float32)},
    "columns": {"gates": np.zeros((2 * L, 6), np.float32)},
    "dtype of one": {"grad_hy": np.zeros((2 * L, 6), np.float64)},
    "integers": {"cx": np.zeros((2 * L, 6), np.int32)},
    "objects": {"gates": np.zeros((2 * L, 24), object)},
    "has_bias": {"has_bias": 1},
    "num_threads": {"num_threads": 0},
    "type of num_threads": {"num_threads": "2"},
    "nonfinite": {"nonfinite": "zero"},
}


@pytest.mark.parametrize("as_dask", [True, False], ids=["dask", "numpy"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_by_the_rules_of_the_package(case, as_dask):
    arguments = make_inputs(2 * L, 6)._asdict() | WRONG[case]
    with pytest.raises(lstmcell_bwd.LSTMCellError) as expected:
        lstm_cell_backward(**arguments)
    changed = WRONG[case] if not as_dask else ()
    arguments = {
        name: da.from_array(value, chunks=L) if isinstance(value, np.ndarray) and name not in changed else value
        for name, value in arguments.items()
    }
    with pytest.raises(type(expected.value)) as caught:
        lstmcell_bwd.dask.lstm_cell_backward(**arguments)
    assert str(caught.value) == str(expected.value)


def test_there_must_be_a_dask_array():
    with pytest.raises(TypeError, match="`cx` must be a dask array where no other argument is one, got ndarray"):
        lstmcell_bwd.dask.lstm_cell_backward(*make_inputs(2 * L, 6))


@pytest.mark.parametrize("field", ["cx", "grad_hy"])
def test_other_collections_are_not_computed(field):
    arrays = chunked(make_inputs(2 * L, 6), L)
    arrays = arrays._replace(**{field: dask.delayed(getattr(arrays, field))})
    with pytest.raises(TypeError, match=f"`{field}` must be a dask array, got Delayed"):
        lstmcell_bwd.dask.lstm_cell_backward(*arrays)


@pytest.mark.parametrize("field", ["cy", "grad_cy"])
def test_masked_arrays(field):
    arrays = chunked(make_inputs(2 * L, 6), L)
    arrays = arrays._replace(**{field: da.ma.masked_greater(getattr(arrays, field), 0.5)})
    message = f"`{field}` must be a dask array of NumPy arrays without a mask, got MaskedArray"
    with pytest.raises(TypeError, match=message):
        lstmcell_bwd.dask.lstm_cell_backward(*arrays)


@pytest.mark.parametrize("rechunk", [None, 1, "yes"])
def test_rechunk_is_a_bool(rechunk):
    with pytest.raises(TypeError, match="`rechunk` must be a bool, got"):
        lstmcell_bwd.dask.lstm_cell_backward(*chunked(make_inputs(2 * L, 6), L), rechunk=rechunk)


def test_arrays_on_an_npu():
    with simulation.backend():
        arrays = chunked(make_inputs(2 * L, 6), L)
        on_npu = lstmcell_bwd.npu.NPUArray.from_numpy(make_inputs(2 * L, 6).cx)
        with pytest.raises(ValueError, match="all tensors must be on the host"):
            lstmcell_bwd.dask.lstm_cell_backward(*arrays._replace(cx=on_npu))
        on_npu.close()


def test_example_of_the_docstring():
    assert doctest.testmod(lstmcell_bwd.dask) == (0, 5)


def test_without_dask_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['dask'] = None; import lstmcell_bwd\n"
        "try:\n    import lstmcell_bwd.dask\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "lstmcell_bwd.dask needs the package dask: pip install 'lstmcell_bwd[dask]'\n"


# ---- a cluster ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    """Start three worker processes of one thread each; the client does not become the default scheduler."""
    options = {"n_workers": 3, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(3, timeout=120)
        yield client


def on_cluster(client, gradients, **options):
    """Compute the three results together on a cluster."""
    return LSTMCellGradients(*client.gather(client.compute(list(gradients), **options)))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_number_of_workers(client, dtype, number):
    """Each chunk is computed by one of the given workers; the bits are those of one call in this process."""
    inputs = make_inputs(11 * L + 7, 8, dtype, seed=9, kind="scaled")
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])[:number]
    futures = client.compute(
        list(lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, L))), workers=workers, allow_other_workers=False
    )
    assert_same_bits(LSTMCellGradients(*client.gather(futures)), plain_call(inputs))
    assert set(itertools.chain.from_iterable(client.who_has(futures).values())) <= set(workers)


def test_results_stay_on_the_workers(client):
    """Persisted chunks lie in several processes, and what follows uses them there."""
    inputs = make_inputs(12 * L, 8, seed=10)
    gradients = LSTMCellGradients(*client.persist(lstmcell_bwd.dask.lstm_cell_backward(*chunked(inputs, L))))
    with client.as_current():
        distributed.wait(list(gradients))
    holders = set(itertools.chain.from_iterable(client.who_has(gradients.grad_gates).values()))
    assert len(holders) > 1
    weights = client.gather(client.compute(gradients.grad_gates.T @ da.from_array(inputs.cx, chunks=(L, -1))))
    np.testing.assert_allclose(weights, plain_call(inputs).grad_gates.T @ inputs.cx, rtol=1e-4, atol=1e-4)
    assert_same_bits(on_cluster(client, gradients), plain_call(inputs))


def test_a_worker_is_killed_in_mid_run(client, tmp_path):
    """The chunks that it had computed are lost, computed again elsewhere, and no bit differs."""
    log, folder = tmp_path / "log", str(tmp_path)
    inputs = make_inputs(12 * L + 3, 8, seed=11, kind="scaled")

    def passed_on(block, folder=folder):
        # Of the worker that is the first to meet its third chunk, only the log is left.
        import os
        import signal
        from pathlib import Path

        log = Path(folder, "log")
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        if log.read_text().split().count(str(os.getpid())) == 3:
            try:
                Path(folder, "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return block

    arrays = chunked(inputs, L)
    arrays = arrays._replace(gates=arrays.gates.map_blocks(passed_on, meta=arrays.gates._meta))
    gradients = lstmcell_bwd.dask.lstm_cell_backward(*arrays)
    assert_same_bits(on_cluster(client, gradients), plain_call(inputs))
    assert (tmp_path / "killed").exists()
    # The chunk that killed it and the two before were computed twice.
    assert len(log.read_text().split()) >= 13 + 3


# ---- the benchmark --------------------------------------------------------------------------------------------------


@pytest.fixture
def dask_chunks():
    return pytest.importorskip("benches.dask_chunks", reason="the benchmarks are in the source tree alone")


def test_benchmark(client, dask_chunks, monkeypatch, capsys):
    """It runs with both schedulers and prints a row for each size; what it times computes every chunk anew."""
    runs = Counter()

    @contextlib.contextmanager
    def schedulers(workers):
        def counted(name, persist, *collections):
            runs[name] += 1
            return persist(*collections)

        threads = functools.partial(dask.persist, scheduler="threads", num_workers=workers)
        cluster = functools.partial(dask_chunks.on_cluster, client)
        yield {
            "threads": functools.partial(counted, "threads", threads),
            "cluster": functools.partial(counted, "cluster", cluster),
        }

    monkeypatch.setattr(dask_chunks, "schedulers", schedulers)
    monkeypatch.setattr(dask_chunks, "take_turns", functools.partial(dask_chunks.take_turns, rounds=1))
    for name, value in {"HIDDEN": 8, "CHUNKS": 2, "FEW": 1, "MANY": 2}.items():
        monkeypatch.setattr(dask_chunks, name, value)
    monkeypatch.setattr(sys, "argv", ["dask_chunks", str(L), str(2 * L)])
    dask_chunks.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" for a call")[0].split(":")[0] for line in lines[2:4]] == ["Dask, threads", "Dask, cluster"]
    assert [line.split(" | ")[0] for line in lines[-2:]] == [f"| {L}", f"| {2 * L}"]
    assert all(line.count("|") == 7 for line in lines[-4:])
    assert min(runs["threads"], runs["cluster"]) >= 4 * (1 + 4)


def test_benchmark_times_the_operator(client, dask_chunks):
    arrays = dask_chunks.on_cluster(client, *dask_chunks.lazy_inputs(3, 2 * L, 8))
    results = []
    for _ in range(2):
        dask_chunks.call(lambda *gradients: results.append(dask_chunks.on_cluster(client, *gradients)), arrays)
    first, second = (LSTMCellGradients(*client.gather(client.compute(list(result)))) for result in results)
    assert_same_bits(first, second)
    assert_same_bits(first, plain_call([np.tile(x, (6, 1)) for x in dask_chunks.data.inputs(L, 8)]))
    assert not {x.name for x in results[0]} & {x.name for x in results[1]}
