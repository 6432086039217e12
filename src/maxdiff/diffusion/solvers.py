"""Samplers, each a short function named after the paper's algorithm.

Every step of all of these is linear in x, the few tensors that the sampler remembers, what the network's answer
means (x_0, and the noise `epsilon`) and fresh noise. So they are written down as in the paper, but run on the
host with unit vectors for tensors: what comes out are the factors of each step, for `sampler.sample` to apply.

A solver is a function (grid, config, eta, start) and yields, for each evaluation of the network from the grid's point
`start` on, the index of the point and the new state: (x, what is remembered...).
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from maxdiff.diffusion.grid import Grid
from maxdiff.diffusion.sampler_config import SamplerConfig

Vector = np.ndarray
Steps = Iterator[tuple[int, tuple[Vector, ...]]]
Solver = Callable[[Grid, SamplerConfig, float, int], Steps]


def _symbols(remembered: int = 0) -> list[Vector]:
    """x, the remembered ones, x_0, epsilon and noise."""
    return list(np.eye(remembered + 4))


def ddpm(grid: Grid, config: SamplerConfig, _eta: float, start: int) -> Steps:
    """Ancestral sampling (Ho et al. 2020, arXiv 2006.11239, algorithm 2, by the posterior of eq. 6-7)."""
    x, x0, _, noise = _symbols()
    last = len(grid.timesteps) - 1
    for i in range(start, last + 1):
        t = grid.timesteps[i]
        abar, abar_next = grid.abar[t], grid.abar[grid.timesteps[i + 1]] if i < last else 1.0
        alpha = abar / abar_next
        mean = np.sqrt(abar_next) * (1 - alpha) * x0 + np.sqrt(alpha) * (1 - abar_next) * x
        large = config.variance_type == "fixed_large"
        variance = (1 - alpha) * (1 if large else (1 - abar_next) / (1 - abar))
        yield i, (mean / (1 - abar) + np.sqrt(variance) * (t > 0) * noise,)


def ddim(grid: Grid, config: SamplerConfig, eta: float, start: int) -> Steps:
    """DDIM (Song et al. 2021, arXiv 2010.02502, eq. 12); eta 0 is deterministic, 1 has the noise of DDPM (eq. 16)."""
    x0, epsilon, noise = _symbols()[1:]
    for i in range(start, len(grid.timesteps)):
        t = grid.timesteps[i]
        abar, abar_next = grid.abar[t], _abar_after(grid, config, t)
        fresh = eta * np.sqrt((1 - abar_next) / (1 - abar) * (1 - abar / abar_next))
        yield i, (np.sqrt(abar_next) * x0 + np.sqrt(1 - abar_next - fresh**2) * epsilon + fresh * noise,)


def _abar_after(grid: Grid, config: SamplerConfig, t: int) -> float:
    # As diffusers steps: by a constant stride, even where the chosen timesteps lie at another (linspace).
    if t >= grid.stride:
        return grid.abar[t - grid.stride]
    return 1.0 if config.set_alpha_to_one else grid.abar[0]


def pndm(grid: Grid, config: SamplerConfig, _eta: float, start: int) -> Steps:
    """PLMS: linear multistep from the first step on (Liu et al. 2022, arXiv 2202.09778, eq. 9, 12, without Runge-Kutta).

    The first step is made twice, the second time with the mean of both ends' slopes, which is why the grid's second
    point is visited twice. As in diffusers, image-to-image drops the first visits, so that from its third step on, x
    has the noise of the point before the one that the network is told.

    What is averaged are answers of the network: under v_prediction, velocities.
    """
    x, first, e1, e2, e3, x0, epsilon, _ = _symbols(4)
    n, averages_velocity = len(grid.timesteps), grid.prediction_type == "v_prediction"
    for step, i in enumerate([0, *range(1, min(n, 2)), *range(1, n)][start:]):
        signal, sigma = grid.signal[i], grid.sigma[i]
        answer = signal * epsilon - sigma * x0 if averages_velocity else epsilon
        t = grid.timesteps[i] + (grid.stride if step == 1 else 0)
        match step:
            case 0:
                slope, origin = answer, x
            case 1:
                slope, origin = (answer + e1) / 2, first
            case 2:
                slope, origin = (3 * answer - e1) / 2, x
            case 3:
                slope, origin = (23 * answer - 16 * e1 + 5 * e2) / 12, x
            case _:
                slope, origin = (55 * answer - 59 * e1 + 37 * e2 - 9 * e3) / 24, x
        abar, after = grid.abar[t], _abar_after(grid, config, t)
        if averages_velocity:
            slope = np.sqrt(abar) * slope + np.sqrt(1 - abar) * origin
        denominator = abar * np.sqrt(1 - after) + np.sqrt(abar * (1 - abar) * after)
        moved = np.sqrt(after / abar) * origin - (after - abar) / denominator * slope
        yield i, (moved, x, e1, e2, e3) if step == 1 else (moved, x, answer, e1, e2)


def euler(grid: Grid, _config: SamplerConfig, _eta: float, start: int) -> Steps:
    """Euler's method (Karras et al. 2022, arXiv 2206.00364, algorithm 2 with S_churn = 0 and first order)."""
    x, x0, _, _ = _symbols()
    for i, sigma, following in _levels(grid, start):
        yield i, (x + (following - sigma) / sigma * (x - x0),)


def euler_ancestral(grid: Grid, _config: SamplerConfig, _eta: float, start: int) -> Steps:
    """Euler's method to below the next noise level, and noise to make up for it (k-diffusion)."""
    x, x0, _, noise = _symbols()
    for i, sigma, following in _levels(grid, start):
        up = np.sqrt(following**2 * (sigma**2 - following**2) / sigma**2)
        down = np.sqrt(following**2 - up**2)
        yield i, (x + (down - sigma) / sigma * (x - x0) + up * noise,)


def heun(grid: Grid, _config: SamplerConfig, _eta: float, start: int) -> Steps:
    """Heun's method (Karras et al. 2022, algorithm 1); all steps but one to sigma = 0 evaluate the network twice."""
    x, origin, slope, x0, _, _ = _symbols(2)
    for i, sigma, following in _levels(grid, start):
        here = (x - x0) / sigma
        yield i, (x + (following - sigma) * here, x, here)
        if following:
            there = (x - x0) / following
            yield i + 1, (origin + (following - sigma) * (slope + there) / 2, origin, slope)


def lms(grid: Grid, _config: SamplerConfig, _eta: float, start: int) -> Steps:
    """Linear multistep of order 4 on uneven noise levels (Adams-Bashforth; k-diffusion).

    Its order grows with what is remembered. diffusers' image-to-image instead begins with factors of order 4,
    whose sum is wrong without the other three slopes.
    """
    x, d1, d2, d3, x0, _, _ = _symbols(3)
    nodes, weights = np.polynomial.legendre.leggauss(2)  # exact for cubic polynomials
    for i, sigma, following in _levels(grid, start):
        slopes = [(x - x0) / sigma, d1, d2, d3][: i - start + 1]
        known = grid.sigmas[i - np.arange(len(slopes))]
        tau = sigma + (following - sigma) * (nodes + 1) / 2
        for j, slope in enumerate(slopes):
            others = np.delete(known, j)
            lagrange = np.prod((tau[:, None] - others) / (known[j] - others), axis=1)
            slopes[j] = (following - sigma) / 2 * (weights @ lagrange) * slope
        yield i, (x + sum(slopes), (x - x0) / sigma, d1, d2)


def _levels(grid: Grid, start: int) -> Iterator[tuple[int, float, float]]:
    for i in range(start, len(grid.timesteps)):
        yield i, grid.sigmas[i], grid.sigmas[i + 1]


def dpmpp_2m(grid: Grid, config: SamplerConfig, _eta: float, start: int) -> Steps:
    """DPM-Solver++ (Lu et al. 2022, arXiv 2211.01095, algorithm 2: 2M; solver_order 1 and 3 too)."""
    return _dpmpp(grid, config, start, stochastic=False)


def dpmpp_2m_sde(grid: Grid, config: SamplerConfig, _eta: float, start: int) -> Steps:
    """SDE-DPM-Solver++ (the same paper, section 5), of order 1 and 2.

    diffusers' order 3 has a sign wrong: the factor of its second difference is -1, not 0, for small steps. So there is
    none here.
    """
    return _dpmpp(grid, config, start, stochastic=True)


def _dpmpp(grid: Grid, config: SamplerConfig, start: int, *, stochastic: bool) -> Steps:
    # m1 and m2 are the x_0 of the two evaluations before.
    x, m1, m2, x0, _, noise = _symbols(2)
    signal, sigma, lam = _log_snr(grid.sigmas)
    n = len(grid.timesteps)
    for i in range(start, n):
        h = lam[i + 1] - lam[i]
        g = 2 * h if stochastic else h  # the SDE forgets x twice as fast
        gained = -np.expm1(-g)
        moved = sigma[i + 1] / sigma[i] * (np.exp(-h) if stochastic else 1) * x + signal[i + 1] * gained * x0
        if stochastic:
            moved = moved + sigma[i + 1] * np.sqrt(gained) * noise
        order = _dpmpp_order(config, i, n, start) if h else 1  # see _log_snr
        if order >= 2:
            before = lam[i] - lam[i - 1]
            slope = h / before * (x0 - m1)
            if order == 3:
                earlier = lam[i - 1] - lam[i - 2]
                bend = slope - h / earlier * (m1 - m2)
                slope = slope + before / (before + earlier) * bend
                moved = moved - signal[i + 1] * ((g - gained) / g**2 - 0.5) * h / (before + earlier) * bend
            half = config.solver_type == "midpoint" and order == 2
            moved = moved + signal[i + 1] * (gained / 2 if half else 1 - gained / g) * slope
        yield i, (moved, x0, m1)


def _dpmpp_order(config: SamplerConfig, i: int, n: int, start: int) -> int:
    """The order of step i of n: no more than what is remembered allows, and lower at the end."""
    few = config.lower_order_final and n < 15
    order = min(config.solver_order, i - start + 1)
    if i == n - 1 and (config.euler_at_final or few or config.final_sigmas_type == "zero"):
        return 1
    return min(order, 2) if i == n - 2 and few else order


def _log_snr(sigmas: Vector) -> tuple[Vector, Vector, Vector]:
    """signal and sigma, whose squares add up to 1, and lambda = log(signal / sigma), of sigma / signal.

    With Karras's noise levels and final_sigmas_type sigma_min, the last step has no length. Order 1 stands still there;
    of a higher order diffusers makes NaN.
    """
    signal = 1 / np.sqrt(sigmas**2 + 1)
    with np.errstate(divide="ignore"):  # infinite where there is no noise
        return signal, sigmas * signal, -np.log(sigmas)


def unipc(grid: Grid, config: SamplerConfig, _eta: float, start: int) -> Steps:
    """UniPC (Zhao et al. 2023, arXiv 2302.04867, algorithm 1-2 with data prediction, B(h) = h for bh1, e^h - 1 for bh2).

    An answer first corrects the x at which it was given, then predicts the next.
    """
    x, origin, *m, x0, _, _ = _symbols(1 + config.solver_order)
    signal, sigma, lam = _log_snr(grid.sigmas)
    n, order = len(grid.timesteps), 0
    for i in range(start, n):
        here = x
        if i > start and i - 1 not in config.disable_corrector:
            nodes = [*(lam[i - 1 - k] for k in range(1, order)), lam[i]]
            here = _unipc_move(config, origin, m[0], [*m[1:order], x0], nodes, (signal[i], sigma[i] / sigma[i - 1]),
                               (lam[i - 1], lam[i]))  # fmt: skip
        m_now = [x0, *m[:-1]]
        order = min(config.solver_order, i - start + 1, n - i if config.lower_order_final else n)
        order = order if lam[i + 1] > lam[i] else 1  # see _log_snr
        nodes = [lam[i - k] for k in range(1, order)]
        moved = _unipc_move(config, here, x0, m_now[1:order], nodes, (signal[i + 1], sigma[i + 1] / sigma[i]),
                            (lam[i], lam[i + 1]))  # fmt: skip
        yield i, (moved, here, *m_now)


def _unipc_move(
    config: SamplerConfig,
    x: Vector,
    m0: Vector,
    others: Sequence[Vector],
    nodes: Sequence[float],
    scale: tuple[float, float],
    lambdas: tuple[float, float],
) -> Vector:
    """From x and its x_0, m0, at lambdas[0] to lambdas[1], with x_0 of the `others`, which lie at lambda = nodes.

    scale is the signal there, and the ratio of sigma there to sigma here.
    """
    h = lambdas[1] - lambdas[0]
    moved = scale[1] * x - scale[0] * np.expm1(-h) * m0
    if not others:
        return moved  # B(h) and what follows is infinite at a last step to no noise at all
    r = (np.asarray(nodes) - lambdas[0]) / h
    base = -h if config.solver_type == "bh1" else np.expm1(-h)
    if len(others) == 1:
        rho = np.array([0.5])  # the paper's simplification for one difference
    else:
        powers = np.arange(len(others))
        rho = np.linalg.solve(r ** powers[:, None], _unipc_right_side(-h, len(others)) / base)
    return moved - scale[0] * base * sum(rho_k / r_k * (m_k - m0) for rho_k, r_k, m_k in zip(rho, r, others, strict=True))


def _unipc_right_side(h: float, count: int) -> Vector:
    """h phi_{k+1}(h) k! for k = 1..count, where phi_{k+1}(h) = (phi_k(h) - 1 / k!) / h and phi_1(h) = (e^h - 1) / h."""
    phi, factorial, found = np.expm1(h) / h, 1, []
    for k in range(1, count + 1):
        factorial *= k
        phi = (phi - 1 / factorial) / h
        found.append(h * phi * factorial)
    return np.array(found)


def lcm(grid: Grid, config: SamplerConfig, _eta: float, start: int) -> Steps:
    """Multistep consistency sampling (Luo et al. 2023, arXiv 2310.04378, algorithm 3), sigma_data = 0.5."""
    x, x0, _, noise = _symbols()
    last = len(grid.timesteps) - 1
    for i in range(start, last + 1):
        scaled = grid.timesteps[i] * config.timestep_scaling
        denoised = scaled / np.sqrt(scaled**2 + 0.25) * x0 + 0.25 / (scaled**2 + 0.25) * x
        if i < last:
            denoised = grid.signal[i + 1] * denoised + grid.sigma[i + 1] * noise
        yield i, (denoised,)


SAMPLERS: dict[str, Solver] = {
    "ddpm": ddpm,
    "ddim": ddim,
    "pndm": pndm,
    "euler": euler,
    "euler_ancestral": euler_ancestral,
    "heun": heun,
    "lms": lms,
    "dpmpp_2m": dpmpp_2m,
    "dpmpp_2m_sde": dpmpp_2m_sde,
    "unipc": unipc,
    "lcm": lcm,
}
