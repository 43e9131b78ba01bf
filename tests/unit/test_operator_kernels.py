"""Kernels of operators on shards: shapes of products and of their gradients, transposes, attention, what is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.cluster import Device, load_cluster
from meshwright.cost.kernels import ATTENTION_BACKWARD
from meshwright.program.graph import Graph, Operator
from meshwright.program.residuals import is_stored
from meshwright.program.traces import Traces
from meshwright.search.prices.choices import operator_choices, parameter_choices
from meshwright.search.prices.kernels import KernelsOf, OperatorKernels
from meshwright.search.prices.operators import prices_of, signatures
from meshwright.search.prices.parameters import parameter_prices
from meshwright.search.prices.product_orders import product_orders, sliced_operands
from meshwright.search.prices.spec_row import SpecRow
from meshwright.sharding import Algorithm, Spec, convert

CPU, A100 = load_cluster("cpu").device, load_cluster("dgx-a100-80").device
SIZES = {"x": 2}


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(loss: Callable[..., Any], params: Any, x: Any) -> Graph:
    def step(params: Any, x: Any) -> Any:
        value, grads = mw.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    return Traces(step).program((params, x)).graph


def found(graph: Graph, name: str) -> Operator:
    (operator,) = (one for one in graph.operators if one.name == name)
    return operator


def algorithms(graph: Graph, operator: Operator) -> list[Algorithm]:
    return [one.algorithm for one in operator_choices(graph, operator, SIZES, of_parameters=False)]


def kernels(graph: Graph, operator: Operator, algorithm: Algorithm, device: Device = A100) -> OperatorKernels:
    return KernelsOf(graph, operator, SIZES, device, stored=True)(algorithm)


def product_graph() -> Graph:
    """[3, 8, 20] x [3, 20, 6], both operands differentiated."""
    return graph_of(lambda p, x: jnp.sum(jnp.sin(jnp.tanh(p["a"] * x) @ p["b"])), {
        "a": array(3, 8, 20), "b": array(3, 20, 6),
    }, array(3, 8, 20))  # fmt: skip


def test_a_product_and_its_gradients_have_their_own_shapes() -> None:
    graph = product_graph()
    operator = found(graph, "dot_general")
    (whole,) = (one for one in algorithms(graph, operator) if not any(one.axes))
    made = kernels(graph, operator, whole)
    assert made.forward.shape == (3, 8, 6, 20)
    assert {one.operand: one.kernel.shape for one in made.gradients} == {0: (3, 8, 20, 6), 1: (3, 20, 6, 8)}
    for kernel in (made.forward, *(one.kernel for one in made.gradients)):
        assert kernel.flops == 2 * prod(kernel.shape) == 2 * 3 * 8 * 6 * 20
        assert kernel.moved_bytes == 4 * 3 * (8 * 20 + 20 * 6 + 8 * 6)
    alone = kernels(graph, replace(operator, differentiated=False), whole)
    assert (alone.forward, alone.gradients) == (made.forward, ())


def test_every_split_of_a_product_halves_one_of_its_extents() -> None:
    graph = product_graph()
    operator = found(graph, "dot_general")
    split = [one for one in algorithms(graph, operator) if any(one.axes)]
    shapes = [kernels(graph, operator, one).forward.shape for one in split]
    assert sorted(set(shapes)) == [(3, 4, 6, 20), (3, 8, 3, 20), (3, 8, 6, 10)]
    assert all(2 * prod(shape) == operator.flops / 2 for shape in shapes)


# Of an einsum, positions of the operands that are copied into another order: for the product itself, for the gradient
# of the left operand, for that of the right one.
ORDERS = {
    # Matrices are read by columns as well as by rows.
    "mk,kn->mn": ((), (), ()),
    "mk,nk->mn": ((), (), ()),
    # Of many matrices only right ones are.
    "bmk,bkn->bmn": ((), (), (0,)),
    # Activations [batch, positions, features] by a matrix: the gradient of the weights reads them by columns.
    "bmk,kn->bmn": ((), (), (0,)),
    # Weights [features, heads, features]: the gradient of the activations reads them in another order.
    "mk,knh->mnh": ((), (1,), ()),
    # Scores of attention, heads in the middle: both operands are reordered, and gradients back.
    "bthd,bshd->bhts": ((0, 1), (1, 0), (0, 1)),
}


def orders(equation: str, *, sliced: frozenset[int] = frozenset()) -> tuple[tuple[int, ...], ...]:
    sizes = {letter: 2 + number for number, letter in enumerate("bmkntshd")}
    left, right = (array(*(sizes[letter] for letter in side)) for side in equation.split("->")[0].split(","))

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.einsum(equation, jnp.sin(params["l"] * x), jnp.sin(params["r"]))))

    graph = graph_of(loss, {"l": left, "r": right}, left)
    return product_orders(found(graph, "dot_general").rule, sliced)


@pytest.mark.parametrize("equation", ORDERS)
def test_products_have_one_order_of_dims(equation: str) -> None:
    assert orders(equation) == ORDERS[equation]


def test_a_matrix_that_a_loop_slices_is_read_in_one_order() -> None:
    assert orders("mk,kn->mn", sliced=frozenset({1})) == ((), (1,), ())


def test_products_copy_what_is_in_another_order_on_cpus_alone() -> None:
    graph = product_graph()
    operator = found(graph, "dot_general")
    copies = {}
    for one in algorithms(graph, operator):
        plain, copied = (kernels(graph, operator, one, device) for device in (A100, CPU))
        assert (plain.forward, plain.copies, copied.copies) == (copied.forward, (), ())
        assert copied.gradients[: len(plain.gradients)] == plain.gradients
        (more,) = copied.gradients[len(plain.gradients) :]
        assert (more.operand, more.kernel.kind, more.runs) == (1, "transpose", 1.0)
        copies[one.operands[0].shards(SIZES)] = more.kernel.moved_bytes
    assert copies == {1: 4 * 3 * 8 * 20, 2: 2 * 3 * 8 * 20}


def test_the_arithmetic_of_chains_is_told_where_it_matters() -> None:
    graph = graph_of(lambda p, x: jnp.sum(jnp.max(jnp.tanh(p * x), axis=1)), array(8, 6), array(8, 6))
    for name, work in (("tanh", 30), ("reduce_max", 30), ("mul", 1)):
        operator = found(graph, name)
        for one in algorithms(graph, operator):
            parts = max(spec.shards(SIZES) for spec in (*one.operands, *one.results))
            flops = [kernels(graph, operator, one, device).forward.flops for device in (CPU, A100)]
            assert flops == [8 * 6 * work / parts, 0.0]


def test_a_transpose_that_is_stored_has_its_own_rate_on_cpus() -> None:
    for order, kind in (((1, 0, 2), "transpose"), ((0, 2, 1), "stored")):  # products read matrices by columns

        def loss(p: Any, x: Any, order: Any = order) -> jax.Array:
            return jnp.sum(jnp.transpose(jnp.sin(p * x), order) @ x)

        graph = graph_of(loss, array(6, 6, 6), array(6, 6, 6))
        operator = found(graph, "transpose")
        one = algorithms(graph, operator)[0]
        assert [kernels(graph, operator, one, device).forward.kind for device in (CPU, A100)] == [kind, "stored"]


def scores_graph() -> Graph:
    """Scores of attention, heads behind positions."""
    shape = array(2, 8, 4, 6)
    return graph_of(
        lambda p, x: jnp.sum(jnp.sin(jnp.einsum("bthd,bshd->bhts", jnp.sin(p["l"] * x), jnp.sin(p["r"] * x)))),
        {"l": shape, "r": shape}, shape,
    )  # fmt: skip


def test_what_products_copy_is_priced() -> None:
    graph = scores_graph()
    operator = found(graph, "dot_general")
    cluster = load_cluster("cpu")
    prices = prices_of(cluster.logical_mesh((8,)), CPU)
    (whole,) = (one for one in algorithms(graph, operator) if not any(one.axes))
    ((forward, backward, *_),) = prices.operator_parts(graph, operator, [whole])
    found_kernels = prices.kernels(graph, operator, whole)
    copy = 4 * 2 * 8 * 4 * 6 / CPU.transpose_bandwidth_bytes_per_second + CPU.kernel_launch_seconds
    assert forward == pytest.approx(prices.kernel(found_kernels.forward) + 2 * copy)
    products = sum(prices.kernel(one.kernel) for one in found_kernels.gradients if one.kernel.kind == "product")
    assert backward == pytest.approx(products + 4 * copy)


def test_a_product_of_what_a_loop_slices_has_a_price_of_its_own() -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["many"])[0]
        return jnp.sum(jnp.tanh(x @ params["one"]))

    graph = graph_of(loss, {"many": array(4, 8, 8), "one": array(8, 8)}, array(16, 8))
    numbers = {signatures(graph)[one.index] for one in graph.operators if one.name == "dot_general"}
    assert len(numbers) == 2


@pytest.mark.parametrize("cluster", ["cpu", "dgx-a100-80"])
def test_a_microbatch_of_one_example_takes_no_less_than_half_of_two(cluster: str) -> None:
    hosts = load_cluster(cluster)
    prices = prices_of(hosts.logical_mesh((8,)), hosts.device)
    taken = []
    for batch in (1, 2):
        graph = graph_of(lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p) @ p)), array(64, 64), array(batch, 512, 64))
        total = 0.0
        for operator in (one for one in graph.operators if not one.is_link):
            (whole,) = (one for one in algorithms(graph, operator) if not any(one.axes))
            total += sum(prices.operator(graph, operator, whole, forward_runs=1))
        taken.append(total)
    assert taken[0] >= 0.5 * taken[1] * (1 - 1e-9)


def convolution_graph() -> Graph:
    """[2, 8, 8, 4] images with a kernel [3, 3, 4, 16], both differentiated."""
    dims = ("NHWC", "HWIO", "NHWC")
    return graph_of(
        lambda p, x: jnp.sum(jax.lax.conv_general_dilated(jnp.sin(p["x"] * x), p["k"], (1, 1), "SAME",
                                                          dimension_numbers=dims) ** 2),
        {"x": array(2, 8, 8, 4), "k": array(3, 3, 4, 16)}, array(2, 8, 8, 4),
    )  # fmt: skip


def test_gradients_of_convolutions_are_transposed_where_a_device_has_to() -> None:
    graph = convolution_graph()
    operator = found(graph, "conv_general_dilated")
    (whole,) = (one for one in algorithms(graph, operator) if not any(one.axes))
    plain, transposed = kernels(graph, operator, whole), kernels(graph, operator, whole, CPU)
    image, kernel, made = 4 * 2 * 64 * 4, 4 * 9 * 4 * 16, 4 * 2 * 64 * 16
    whole_bytes = image + kernel + made
    assert (plain.forward.flops, plain.forward.moved_bytes) == (2 * 128 * 9 * 4 * 16, whole_bytes)
    # Features made: the gradient of the image makes as many as that has.
    assert plain.forward.shape == (16,)
    assert {one.operand: one.kernel.shape for one in plain.gradients} == {0: (4,), 1: (16,)}
    # What is in the kernel's place is packed: written and read once more.
    assert transposed.forward == plain.forward._replace(moved_bytes=whole_bytes + 2 * kernel)
    assert [(one.operand, one.kernel.kind, one.kernel.moved_bytes) for one in transposed.gradients] == [
        (0, "convolution", whole_bytes + 2 * kernel), (0, "stored", kernel),
        (1, "convolution", whole_bytes + 2 * made), (1, "transpose", image), (1, "transpose", made),
        (1, "stored", kernel),
    ]  # fmt: skip


def test_every_split_of_a_convolution_has_smaller_transposes() -> None:
    graph = convolution_graph()
    operator = found(graph, "conv_general_dilated")
    sizes = set()
    for one in algorithms(graph, operator):
        moved = {
            gradient.kernel.moved_bytes
            for gradient in kernels(graph, operator, one, CPU).gradients
            if gradient.kernel.kind == "transpose"
        }
        shards = [spec.shards(SIZES) for spec in (one.operands[0], one.results[0])]
        assert moved == {4 * 2 * 64 * 4 / shards[0], 4 * 2 * 64 * 16 / shards[1]}
        sizes |= moved
    assert len(sizes) > 2


def test_gathers_along_inner_dims_are_transposed_on_cpus_alone() -> None:
    size, mesh = 2.0**20, load_cluster("cpu").logical_mesh((8,), ("x",))
    whole = SpecRow([Spec(((), ()), broadcast=frozenset({"x"}))])
    for device, transposes in ((CPU, 1 / CPU.transpose_bandwidth_bytes_per_second), (A100, 0.0)):
        prices = prices_of(mesh, device)
        rows, columns = (SpecRow([Spec(dims)]) for dims in ((("x",), ()), ((), ("x",))))
        first, inner = (
            prices.conversion_table(source, whole, size, forward_runs=2, differentiated=True)[0, 0]
            for source in (rows, columns)
        )
        # Forward twice, and the scatter of the cotangent.
        assert inner - first == pytest.approx(3 * size * transposes, abs=1e-15)
        for source, strided in ((rows, False), (columns, True)):
            (step,) = convert(source[0], whole[0]) or ()
            assert step.strided == strided
            alone = prices.collective("all_gather", size, ("x",), strided=step.strided)
            table = prices.conversion_table(source, whole, size, forward_runs=1, differentiated=True, backward=False)
            assert table[0, 0] == pytest.approx(alone)


def test_attention_is_told_from_other_calls_by_what_keys_and_values_share() -> None:
    def plain(query: Any, key: Any, value: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    own = jax.custom_vjp(plain)
    own.defvjp(lambda *x: (plain(*x), x), lambda kept, g: jax.vjp(plain, *kept)[1](g))

    def mixed(p: Any, x: Any) -> Any:
        query = jnp.sin(x * p)
        return jnp.sum(own(query, query, query))

    graph = graph_of(mixed, array(16), array(2, 32, 4, 16))
    operator = found(graph, "custom_vjp_call")
    made = kernels(graph, operator, algorithms(graph, operator)[-1])
    assert made.forward.kind == "attention"
    assert sum(one.runs for one in made.gradients) == pytest.approx(ATTENTION_BACKWARD)

    @jax.custom_vjp
    def three(x: Any, w: Any, b: Any) -> Any:
        return x @ w + b

    three.defvjp(lambda x, w, b: (three(x, w, b), (x, w, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g, g))
    other = graph_of(lambda p, x: jnp.sum(three(x, p, x)), array(8, 8), array(8, 8))
    operator = found(other, "custom_vjp_call")
    assert kernels(other, operator, algorithms(other, operator)[-1]).forward.kind == "product"


def test_single_numbers_are_not_stored_by_a_kernel_of_their_own() -> None:
    graph = product_graph()
    last = found(graph, "reduce_sum")
    assert not is_stored(graph, last)
    # What a product reads is stored; the factors before it are made on the way.
    assert [one.name for one in graph.operators if is_stored(graph, one)] == ["tanh", "dot_general", "sin"]


def test_passes_add_up_to_what_an_operator_takes() -> None:
    graph = product_graph()
    prices = prices_of(load_cluster("cpu").logical_mesh((8,)), CPU)
    operator = found(graph, "dot_general")
    right = operator.operands[1]
    assert right is not None
    (whole,) = (one for one in algorithms(graph, operator) if not any(one.axes))
    both, inside = prices.operator(graph, operator, whole, forward_runs=1)
    ((forward, backward, *_, weight),) = prices.operator_parts(graph, operator, [whole], {right})
    ((*_, every),) = prices.operator_parts(graph, operator, [whole], set(filter(None, operator.operands)))
    assert inside == 0
    assert forward + every == forward + backward == pytest.approx(both)
    assert 0 < weight < every


@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
@pytest.mark.parametrize("hosts", ["dgx-a100-80", "cpu"])
def test_all_ways_to_run_an_operator_are_priced_as_each_of_them(name: str, hosts: str) -> None:
    target = zoo.build(name, global_batch=8)
    graph = Traces(target.step).program((target.example_state, target.example_batch)).graph
    cluster = load_cluster(hosts)
    prices = prices_of(cluster.logical_mesh((2, 4)), cluster.device)
    names = set()
    for operator in graph.operators:
        choices = operator_choices(graph, operator, prices.sizes, of_parameters=False)
        some = set(operator.operands[:1])
        known = prices.of_operator(graph, operator, choices, some)
        parts = prices.operator_parts(graph, operator, [one.algorithm for one in choices], some)
        assert known.forward_seconds == pytest.approx([forward + inside for forward, _, inside, *_ in parts])
        assert known.backward_seconds == pytest.approx([backward + mirrored for _, backward, _, mirrored, _ in parts])
        assert known.weight_seconds == pytest.approx([weight for *_, weight in parts])
        names.add(operator.name)
    assert {"dot_general", "add", "reduce_max"} <= names


def test_what_a_scan_slices_is_copied_on_cpus_alone() -> None:
    """Four layers of [8, 8] weights: a pass over each forward; three times that backward."""

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

    graph = graph_of(loss, array(4, 8, 8), array(16, 8))
    link = found(graph, "scan_slice")
    assert sliced_operands(graph, found(graph, "dot_general")) == {1}
    for device, passes in ((CPU, 1.0), (A100, 0.0)):
        prices = prices_of(load_cluster("cpu").logical_mesh((2, 4), ("x", "y")), device)
        for algorithm in (one.algorithm for one in operator_choices(graph, link, prices.sizes, of_parameters=True)):
            ((forward, backward, *others),) = prices.operator_parts(graph, link, [algorithm])
            once = 8 * 8 * 4 / algorithm.results[0].shards(prices.sizes) / device.memory_bandwidth_bytes_per_second
            assert (forward, backward) == (pytest.approx(passes * once), pytest.approx(3 * passes * once))
            assert others == [0.0, 0.0, 0.0]


def test_only_plain_sums_of_gradients_share_a_start() -> None:
    """`run_together` joins gradients that are summed and nothing else: of four, each pays a fourth of the start."""
    cluster = load_cluster("dgx-a100-80")
    prices = prices_of(cluster.logical_mesh((2, 4), ("x", "y")), cluster.device)
    choices = parameter_choices((64, 64), prices.sizes)
    alone, shared = (
        parameter_prices(prices, choices, 4.0 * 64 * 64, 0.0, parameters=count, central=False) for count in (1, 4)
    )
    cut = 0
    for number, choice in enumerate(choices):
        gradient = convert(Spec(choice.use.dims, partial=choice.use.broadcast), choice.storage)
        assert gradient is not None
        kinds = [step.kind for step in gradient]
        cut += "all_reduce" in kinds and len(kinds) > 1
        start = prices.collective("all_reduce", 1.0, gradient[0].axes) if kinds == ["all_reduce"] else 0.0
        saved = alone.synchronise_seconds[number] - shared.synchronise_seconds[number]
        assert saved == pytest.approx(0.75 * start)
        assert shared.fixed_seconds[number] == pytest.approx(0.25 * start)
    assert cut


def softmax_loss(params: Any, x: Any) -> Any:
    scores = x @ params["q"]
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.mean((jax.nn.softmax(scores) @ params["v"]) ** 2)


def test_a_chain_that_products_read_is_made_inside_them_on_tpus() -> None:
    """Outside of loops sums along rows take it in too; sums along others, such as a batch norm's, are passes."""
    params = {"q": array(16, 32), "v": array(32, 8)}
    graph = graph_of(softmax_loss, params, array(32, 16))
    divided = [
        one for one in graph.operators if one.name == "div" and len(graph.values[one.results[0] or 0].shape) == 2
    ]
    exponential = found(graph, "exp")
    assert is_stored(graph, exponential)
    assert is_stored(graph, divided[0])
    assert not is_stored(graph, exponential, joined=True)
    assert not is_stored(graph, divided[0], joined=True)

    def columns(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.exp(x @ params["q"]).sum(0) * params["b"])

    normed = graph_of(columns, {"q": array(16, 32), "b": array(32)}, array(8, 16))
    assert is_stored(normed, found(normed, "exp"), joined=True)

    def layers(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jax.nn.softmax(h @ w), None), x, params)[0])

    looped = graph_of(layers, array(4, 16, 16), array(8, 16))
    assert is_stored(looped, found(looped, "exp"), joined=True)


def test_what_depends_on_no_input_is_free_where_it_is_fused() -> None:
    graph = graph_of(softmax_loss, {"q": array(16, 32), "v": array(32, 8)}, array(32, 16))
    prices = prices_of(load_cluster("dgx-a100-80:1").logical_mesh((8,)), A100)
    masks = [
        one for one in graph.operators if one.name == "broadcast_in_dim" and graph.values[one.results[0] or 0].constant
    ]
    assert masks
    for one in masks:
        choices = operator_choices(graph, one, prices.sizes, of_parameters=False)
        assert not prices.of_operator(graph, one, choices, ()).forward_seconds.any()


def test_on_tpus_values_are_held_in_whole_tiles_of_their_blocks() -> None:
    graph = product_graph()
    value = next(v for v in graph.values if v.shape == (3, 8, 20))
    specs = SpecRow([Spec.replicated(3), Spec(((), ("x",), ()))])
    for name, bytes_held in (("dgx-a100-80", [4 * 480, 4 * 240]), ("tpu-v5e:8", [4 * 3 * 8 * 128, 4 * 3 * 8 * 128])):
        cluster = load_cluster(name)
        prices = prices_of(cluster.logical_mesh((4, 2), ("y", "x")), cluster.device)
        assert prices.held_bytes(value, specs).tolist() == bytes_held


def rounding_graph(dtype: Any) -> Graph:
    """A product of operands that are rounded by the largest element of the first, [64, 32] x [32, 16]."""

    def narrow(x: Any) -> Any:
        return x.astype(dtype)

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return jnp.dot(narrow(x / jnp.max(jnp.abs(x))), narrow(w), preferred_element_type=jnp.float32)

    def backward(kept: Any, g: Any) -> Any:
        x, w = map(narrow, kept)
        return narrow(g).astype(jnp.float32) @ w.astype(jnp.float32).T, x.astype(jnp.float32).T @ g

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return graph_of(lambda p, x: jnp.sum(product(jnp.tanh(x), p)), array(32, 16), array(64, 32))


def test_what_a_call_reduces_inside_has_a_collective_where_it_is_split() -> None:
    graph = rounding_graph(jnp.float32)
    call = found(graph, "custom_vjp_call")
    prices = prices_of(load_cluster("dgx-a100-80").logical_mesh((4, 2), ("y", "x")), A100)
    seen = set()
    for choice in operator_choices(graph, call, prices.sizes, of_parameters=False):
        axes = {axis for dim in choice.algorithm.operands[0].dims for axis in dim}
        inner = prices.inner_collectives(graph, call, choice.algorithm)
        # One number, whatever else is split; the gradients' sums are those of operands.
        assert [(one.kind, one.size_bytes, {*one.axes}) for one in inner] == [("all_reduce", 4.0, axes)] * bool(axes)
        seen.add(frozenset(axes))
    assert seen == {frozenset(some) for some in ("", "x", "y", "xy")}


def test_a_call_runs_its_products_in_their_type_and_its_derivative_as_often_as_it_has_some() -> None:
    graph = rounding_graph(jnp.float8_e4m3fn)
    call = found(graph, "custom_vjp_call")
    assert call.multiplied == "float8_e4m3fn"
    (whole,) = (one for one in algorithms(graph, call) if not any(one.axes))
    of = kernels(graph, call, whole)
    assert of.forward.dtype == "float8_e4m3fn"
    assert sum(one.runs for one in of.gradients) == pytest.approx(2.0)


def test_products_of_8_bits_run_in_16_where_there_are_no_units_for_them() -> None:
    for cluster, wanted in (("dgx-h100", "float8_e4m3fn"), ("dgx-a100-80", "bfloat16"), ("p3.16xlarge", "float16")):
        assert load_cluster(cluster).device.multiplied_as("float8_e4m3fn") == wanted
    assert load_cluster("p3.16xlarge").device.multiplied_as("bfloat16") == "float32"


def test_numbers_of_rows_are_not_what_a_mixture_multiplies() -> None:
    def step(p: Any, x: Any, sizes: Any) -> Any:
        value, gradient = mw.value_and_grad(lambda p: jnp.sum(jnp.sin(jax.lax.ragged_dot(x, p, sizes))))(p)
        return p - gradient, value

    operands = (array(4, 16, 8, dtype=jnp.bfloat16), array(64, 16, dtype=jnp.bfloat16), array(4, dtype=jnp.int32))
    graph = Traces(step).program(operands).graph
    assert found(graph, "ragged_dot_general").multiplied == "bfloat16"
