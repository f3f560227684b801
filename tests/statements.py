"""What lessons say about their outputs, each with the numbers that could deny it."""

from collections.abc import Callable
from typing import NamedTuple


class Statement(NamedTuple):
    """Words of a lesson, and patterns whose groups are the numbers that `holds` is asked about."""

    lesson: str
    words: str
    found: tuple[str, ...]
    holds: Callable[..., bool]


STATEMENTS = [
    Statement(
        "00",
        "That costs far less than 41 single tokens would",
        (r"ms \| ([\d.]+) ms, \d+% of the speed", r"([\d.]+) ms until the first token"),
        lambda one_token, prompt: prompt < 41 * one_token / 3,
    ),
    Statement(
        "00",
        "The rest is what is left: attention, and matrices that are read below the bandwidth.",
        (r"\+ rest\n[-| ]+\n[\d.]+ \| [\d.]+ \| ([\d.]+) \| (-?[\d.]+)",),
        lambda small_steps, rest: small_steps > 0 and rest > 0,
    ),
    Statement(
        "00",
        "The small steps do not shrink with the bytes, and unpacking the numbers takes time.",
        (
            r"weights in 8 bits \| [^|]* \| ([\d.]+) × \| ([\d.]+) ×",
            r"weights in 4 bits \| [^|]* \| ([\d.]+) × \| ([\d.]+) ×",
        ),
        lambda promised_8, measured_8, promised_4, measured_4: (
            measured_8 < promised_8 and measured_4 < promised_4
        ),
    ),
    Statement(
        "00",
        "The first number is far below the second, so no choice flips here.",
        (r"moves a score by at most ([\d.]+); the best two scores are at least ([\d.]+) apart",),
        lambda move, gap: move < gap / 10,
    ),
    Statement(
        "00",
        "Eight users at once gave the most tokens per second",
        (
            r"engine, 8 at once \| [^|]* \| [\d.]+ × \| ([\d.]+) ×",
            r"weights in 16 bits \| [^|]* \| [\d.]+ × \| ([\d.]+) ×",
            r"weights in 8 bits \| [^|]* \| [\d.]+ × \| ([\d.]+) ×",
            r"weights in 4 bits \| [^|]* \| [\d.]+ × \| ([\d.]+) ×",
        ),
        lambda eight_users, *fewer_bits: eight_users > max(fewer_bits),
    ),
    Statement(
        "01",
        "counting FLOPs predicts the time, here to about a factor of two",
        (
            r"peak ([\d,.]+) GFLOP/s",
            r"the FLOPs say ([\d.]+) times",
            r"the clock says \*\*([\d.]+) times",
            r"the single token's ([\d.]+) ms",
        ),
        # a token has 269 million FLOPs, as the lesson counts
        lambda gflops, by_flops, by_clock, one_ms: (
            0.5 < by_clock * one_ms / (by_flops * 269 / gflops) < 2
        ),
    ),
    Statement(
        "01",
        "the FLOPs explain next to nothing",
        (r"Its arithmetic explains ([\d.]+)%",),
        lambda percent: percent < 15,
    ),
    Statement(
        "01",
        "Even the reading is only a part of the time.",
        (r"GB/s = [\d.]+ ms, \*\*([\d.]+)%\*\*",),
        lambda percent: percent < 95,
    ),
    Statement(
        "01",
        "but takes far more than that fraction of its",
        (r"the FLOPs say ([\d.]+) times", r"the clock says \*\*([\d.]+) times"),
        lambda by_flops, by_clock: by_clock < by_flops / 3,
    ),
    Statement(
        "02",
        "A long question makes the pause much longer, and the rhythm of the stream hardly changes.",
        (
            r"\| prepacked \| [\d.]+ ms \| [\d.]+ ms \| \*\*([\d.]+)\*\*",
            r"\| 64 \| ([\d.]+) ms \| [\d.]+ × \|",
            r"\| 1,024 \| ([\d.]+) ms \| [\d.]+ × \|",
        ),
        lambda pause, step_at_64, step_at_1024: pause > 3 and step_at_1024 / step_at_64 < 1.3,
    ),
    Statement(
        "02",
        "256 times the tokens, but nowhere near 256 times the time.",
        (
            r"\| as loaded \| [\d.]+ ms \| [\d.]+ ms \| \*\*([\d.]+)\*\*",
            r"\| prepacked \| [\d.]+ ms \| [\d.]+ ms \| \*\*([\d.]+)\*\*",
        ),
        lambda as_loaded, prepacked: max(as_loaded, prepacked) < 100,
    ),
    Statement(
        "02",
        "one token is far below the break-even. The prefill of 256 is far above it on a CPU",
        (
            r"\| decode \| ([\d.]+) ms \| ([\d.]+) ms \|",
            r"\| prefill of 256 \| ([\d.]+) ms \| ([\d.]+) ms \|",
        ),
        lambda decode_arithmetic, decode_memory, prefill_arithmetic, prefill_memory: (
            decode_memory > 3 * decode_arithmetic and prefill_arithmetic > 3 * prefill_memory
        ),
    ),
    Statement(
        "02",
        "eight users wait longer than one alone, but together get several times as many",
        (
            r"\| a step for 8 users \| [^|]* \| [\d.]+ \| \*\*([\d.]+)\*\*",
            r"8 users together get \*\*([\d.]+) ×\*\*",
        ),
        lambda wait, gain: 1 < wait < 2 and gain > 3,
    ),
    Statement(
        "02",
        "Every pass takes longer than its bound, but not all by the same factor",
        (r"The passes take ([\d.]+) to ([\d.]+) times",),
        lambda least, most: 1 < least < 0.9 * most,
    ),
    Statement(
        "02",
        "the head comes nearest to the bandwidth. The 120 smaller matrices are read more slowly",
        (r"is read at \*\*([\d.]+) GB/s", r"the 120 others at \*\*([\d.]+)\*\*"),
        lambda head, others: others < head,
    ),
    Statement(
        "02",
        "The longer the contexts, the smaller the gain: each user brings more to read",
        (
            r"\| 64 \| [\d.]+ ms \| ([\d.]+) × \| \*\*([\d.]+) ×",
            r"\| 1,024 \| [\d.]+ ms \| ([\d.]+) × \| \*\*([\d.]+) ×",
        ),
        lambda short_predicted, short_measured, long_predicted, long_measured: (
            long_predicted < short_predicted and long_measured < short_measured
        ),
    ),
    Statement(
        "03",
        "The naive step is busy computing, the cached one waits for memory.",
        (
            r"\| without a cache \| [^|:]+: ([\d.]+) ms \| [^|:]+: ([\d.]+) ms",
            r"\| with a cache \| [^|:]+: ([\d.]+) ms \| [^|:]+: ([\d.]+) ms",
        ),
        lambda naive_arithmetic, naive_memory, cached_arithmetic, cached_memory: (
            naive_arithmetic > naive_memory and cached_arithmetic < cached_memory
        ),
    ),
    Statement(
        "03",
        "So we predict a far smaller gain than the work suggests.",
        (r"with one: ([\d.]+) times less work", r"a cache makes it \*\*([\d.]+) times\*\*"),
        lambda less_work, predicted: predicted < less_work / 3,
    ),
    Statement(
        "03",
        "**With a cache the length adds little.**",
        (
            r"\n\| 16 \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|",
            r"\n\| 384 \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|",
        ),
        lambda at_16, at_384: at_384 < 1.3 * at_16,
    ),
    Statement(
        "03",
        "**Neither way reaches its bound**",
        tuple(
            rf"\n\| {n} \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|"
            for n in (16, 32, 64, 128, 256, 384)
        ),
        lambda *over_bound: min(over_bound) > 1,
    ),
    Statement(
        "03",
        "the cached step stays farther above its own. So the gain is smaller than predicted.",
        (
            r"\n\| 256 \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
            r"\n\| 384 \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
        ),
        lambda naive_256, cached_256, gain_256, predicted_256, naive, cached, gain, predicted: (
            cached_256 > naive_256
            and gain_256 < predicted_256
            and cached > naive
            and gain < predicted
        ),
    ),
    Statement(
        "03",
        "**A whole answer** gains less than its last token, since early tokens gain little",
        (
            r"tokens together: ([\d.]+) times faster\. Only the last one:\s([\d.]+) times",
            r"\n\| 16 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|",
        ),
        lambda whole, last, early: whole < last and early < last / 2,
    ),
    Statement(
        "03",
        "makes a step far less than 293 times faster",
        (r"guess, ([\d.]+) measured",),
        lambda measured: measured < 293 / 3,
    ),
    Statement(
        "04",
        "on a CPU even the Python loop over the heads is faster",
        (r"head_by_head +([\d.]+) ms", r"naive +([\d.]+) ms"),
        lambda loop, copies: loop < copies,
    ),
    Statement(
        "04",
        "attention takes about twice as long as MHA, the ratio that the bytes say",
        (r"by the bytes ([\d.]+) ×", r"into memory that is kept ([\d.]+) ×"),
        lambda by_bytes, measured: 1.5 < measured < 2.6 and 0.75 < measured / by_bytes < 1.33,
    ),
    Statement(
        "04",
        "on a CPU the operating system stops the program at each new page of 4 kB",
        (r"measured \*\*([\d.]+) ×\*\*; into memory that is kept ([\d.]+) ×",),
        lambda new_memory, kept_memory: new_memory > 1.2 * kept_memory,
    ),
    Statement(
        "04",
        "**Attention alone** takes longer than its bound at every K, and gains less than predicted",
        (
            *(
                rf"\n\| {k} \| (\d+\.\d+) \| (\d+\.\d+) \| \d+\.\d+ \| \d+\.\d+ \|\n"
                for k in (16, 8, 4, 2, 1)
            ),
            r"\| attention alone \| [^|]* \| ([\d.]+) × \| ([\d.]+) ×",
        ),
        lambda *numbers: (
            all(numbers[i] < numbers[i + 1] for i in range(0, 10, 2)) and numbers[11] < numbers[10]
        ),
    ),
    Statement(
        "04",
        "**The whole step** gains less than attention alone, as predicted",
        (
            r"\| attention alone \| [^|]* \| ([\d.]+) × \| ([\d.]+) ×",
            r"\| whole step \| [^|]* \| ([\d.]+) × \| ([\d.]+) ×",
        ),
        lambda attention_predicted, attention_measured, step_predicted, step_measured: (
            step_predicted < attention_predicted and step_measured < attention_measured
        ),
    ),
    Statement(
        "04",
        "here 5% of the steps repair most of the damage, but not all",
        (r"5% of the steps repair ([\d.]+)% of that",),
        lambda percent: 50 < percent < 100,
    ),
    Statement(
        "05",
        "**Memory** is what tiles save, about as much as predicted.",
        (r"with tiles: your guess \d+, predicted (\d+), \*\*measured (\d+)\*\*",),
        lambda predicted, measured: 0.7 < measured / predicted < 1.4,
    ),
    Statement(
        "05",
        "Much of what tiles save here is the price of fresh memory",
        (
            r"\| `plain` \|.*\| ([\d.]+) \|\n",
            r"\| `plain, held` \|.*\| ([\d.]+) \|\n",
            r"\| `sdpa` \|.*\| ([\d.]+) \|\n",
        ),
        lambda plain, held, sdpa: plain > sdpa and plain - held > (plain - sdpa) / 2,
    ),
    Statement(
        "05",
        "with larger tiles it is quicker.",
        (r"\| `tiled` \|.*\| ([\d.]+) \|\n", r"\| `tiled`, tiles of 256 .*\| ([\d.]+) \|\n"),
        lambda small, large: large < 0.9 * small,
    ),
    Statement(
        "05",
        "and it even removes work: tiles above the diagonal are never visited.",
        (r"\| `sdpa`, causal mask \|.*\| ([\d.]+) \|\n", r"\| `sdpa` \|.*\| ([\d.]+) \|\n"),
        lambda causal, full: causal < 0.9 * full,
    ),
    Statement(
        "06",
        "The same tokens as without any sharing, and a small part of the wait.",
        (r"measured, time \| ([\d.]+)%",),
        lambda percent: percent < 20,
    ),
    Statement(
        "06",
        "But a pass of a few tokens waits for the weights to be read, however few they are.",
        (
            r"predicted, FLOPs \| ([\d.]+)%",
            r"time \(from the bounds\) \| ([\d.]+)%",
            r"measured, time \| ([\d.]+)%",
        ),
        lambda flops, bound, measured: flops < bound and flops < measured,
    ),
    Statement(
        "06",
        "It costs a copy where attention is an ordinary PyTorch call, as here on the CPU",
        (r"([\d.]+) ms in one piece; in blocks ([\d.]+) predicted, ([\d.]+) measured",),
        lambda whole, with_copy, measured: measured - whole > (with_copy - whole) / 2,
    ),
    Statement(
        "06",
        "So blocks run more than six times as many requests at once as pieces of 8192, but give "
        "3.3 times the answers, and only a seventh more than the careful server, whose users wait "
        "less between two tokens.",
        (
            r"room for 8192 \| .*% \| [\d.]+ → ([\d.]+) \|",
            r"blocks of 16 \| .*% \| [\d.]+ → ([\d.]+) \|",
            r"with blocks: ([\d.]+) against 8192, ([\d.]+) against prompt \+ 601",
            r"its prompt \+ 601 \| .* \| (\d+) ms \|",
            r"blocks of 16 \| .* \| (\d+) ms \|",
        ),
        lambda pieces, blocks, times, careful, careful_wait, wait: (
            blocks / pieces > 6
            and times == 3.3
            and 1 / 8 < careful - 1 < 1 / 6
            and careful_wait < wait
        ),
    ),
    Statement(
        "07",
        "so the gain in time is smaller than the gain in steps",
        (r"continuous against static: ([\d.]+) times fewer steps", r"times, measured ([\d.]+);"),
        lambda steps, time: time < steps,
    ),
    Statement(
        "07",
        "Eight tokens cost nowhere near eight times one, neither by the bound nor by the clock.",
        (
            r"\n\| 1 \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|",
            r"\n\| 8 \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|",
        ),
        lambda bound_1, clock_1, bound_8, clock_8: max(bound_8 / bound_1, clock_8 / clock_1) < 4,
    ),
    Statement(
        "07",
        "the price of a step is good to **about ±10%**.",
        tuple(rf"\n\| {n} \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|" for n in (1, 2, 4, 8, 16)),
        lambda *both: all(0.85 < both[i] / both[i + 1] < 1.15 for i in range(0, 10, 2)),
    ),
    Statement(
        "07",
        "The first two make the gain smaller.",
        (r"times, measured [\d.]+; measured/predicted ([\d.]+)",),
        lambda ratio: ratio < 1,
    ),
    Statement(
        "07",
        "requests wait less outside, and nobody's finished answer is held back for others.",
        (r"mean latency: ([\d.]+) times shorter; ([\d.]+) times if static",),
        lambda as_it_is, handed_out_at_once: as_it_is > handed_out_at_once > 1,
    ),
    Statement(
        "07",
        "the longest answer was in the first batch anyway, and its steps are now fuller, so it "
        "comes later.",
        (r"later than in the static run: \[.*\b(1)\b.*\]",),
        lambda longest: longest == 1,
    ),
    Statement(
        "07",
        "With a small budget the same work is spread over more steps, none as long as the one big "
        "step.",
        (
            r"first token of the long prompt \(ms\) \|\n.*\n\| \d+ \| (\d+) \| (\d+) \|"
            r".*\n.*\n\| \d+ \| (\d+) \| (\d+) \|",
        ),
        lambda steps, pause, steps_of_one, pause_of_one: (
            steps > steps_of_one and pause < pause_of_one
        ),
    ),
    Statement(
        "07",
        "so with the smallest budget the newcomer waits longest.",
        (
            r"first token of the long prompt \(ms\) \|\n.*\n\|.*\| (\d+) \|\n\|.*\| (\d+) \|\n"
            r"\|.*\| (\d+) \|",
        ),
        lambda smallest, middle, whole: smallest > max(middle, whole),
    ),
    Statement(
        "08",
        "the p90 of the ITL lies far above its p50",
        (r"p50 ITL \(ms\) +([\d.,]+)", r"p90 ITL \(ms\) +([\d.,]+)"),
        lambda p50, p90: p90 > 2 * p50,
    ),
    Statement(
        "08",
        "The real engine takes longer than its roofline",
        (r"measured/predicted \*\*([\d.]+)\*\*",),
        lambda ratio: ratio > 1,
    ),
    Statement(
        "08",
        "a step of decodes misses it by another factor than a step with prompt tokens",
        (r"decodes only ([\d.]+), with prompt tokens (\d+\.\d+)",),
        lambda decodes, prompts: max(decodes, prompts) > 1.25 * min(decodes, prompts),
    ),
    Statement(
        "08",
        "The simulated knee lies between the two predictions",
        (r"predicted ([\d.]+) to ([\d.]+), simulated ([\d.]+) requests per second",),
        lambda in_turns, side_by_side, simulated: in_turns < simulated < side_by_side,
    ),
    Statement(
        "08",
        "Both report about the same number of answers per second",
        (r"open: ([\d.]+) answers per second", r"closed: ([\d.]+) answers per second"),
        lambda open_loop, closed_loop: 0.9 < closed_loop / open_loop < 1.1,
    ),
    Statement(
        "08",
        "Goodput, the answers that came in time, has its maximum near or below the knee.",
        (r"Chat: highest at (\d+) per second", r"simulated ([\d.]+) requests per second"),
        lambda best, knee: best < 1.1 * knee,
    ),
    Statement(
        "08",
        "About four in ten of the last ones are late.",
        (r"let in as number 11: .*simulated \*\*(\d+)\*\*",),
        lambda late: 35 <= late <= 45,
    ),
    Statement(
        "09",
        "**Decode** gains less than the bytes promise.",
        (r"measured / predicted ([\d.]+)",),
        lambda ratio: ratio < 1,
    ),
    Statement(
        "09",
        "Converting first gives the gain back",
        (r"float32 product +([\d.]+) ms", r"int8, made float first +([\d.]+) ms"),
        lambda float32, float_first: float_first > 0.9 * float32,
    ),
    Statement(
        "09",
        "section 5 timed two of them alone, and there, too, int8 gained less than its bytes",
        (r"float32 product +([\d.]+) ms", r"int8, in registers +([\d.]+) ms"),
        lambda float32, in_registers: 1 < float32 / in_registers < 4,
    ),
    Statement(
        "09",
        "**Weight-only quantization speeds up the one user who waits for a token",
        (
            r"\| bfloat16 \| ([\d.]+) \| [\d.]+ \|\n",
            r"\| int8 \| ([\d.]+) \| [\d.]+ \|\n",
            r"\| int4 \| ([\d.]+) \| [\d.]+ \|\n",
        ),
        lambda bfloat16, int8, int4: max(int8, int4) < bfloat16,
    ),
    Statement(
        "09",
        "the passes around it take a large part of such a gain, or more than all of it.",
        (
            r"bfloat16: the product +(\d+) µs",
            r"int8: the product +(\d+) µs",
            r"int8: all, with the scales +(\d+) µs",
        ),
        lambda bfloat16, product, everything: everything - product > 0.25 * (bfloat16 - product),
    ),
    Statement(
        "09",
        "Both cures help; a scale for each token, which both papers also use, helps more.",
        (
            r"\| one scale a tensor \| ([\d.]+) \|",
            r"\| SmoothQuant, one scale a tensor \| ([\d.]+) \|",
            r"\| one scale a token \| ([\d.]+) \|",
            r"\| LLM.int8\(\), one scale a token \| ([\d.]+) \|",
            r"\| SmoothQuant, one scale a token \| ([\d.]+) \|",
        ),
        lambda tensor, smooth_tensor, token, llm_int8, smooth: (
            max(llm_int8, smooth) < token < smooth_tensor < tensor
        ),
    ),
    Statement(
        "09",
        "per channel loses a fraction of what per token does, in about a third of the bytes.",
        (
            r"int4, keys per token .*, KL ([\d.]+),",
            r"int4, keys per channel +([\d.]+) of bfloat16's bytes, KL ([\d.]+),",
        ),
        lambda token, share, channel: channel < token / 3 and 0.28 < share < 0.4,
    ),
    Statement(
        "09",
        "GPTQ takes a quarter to a half of that loss away, and AWQ more.",
        tuple(
            rf"\| {name}, shifted \| [\d.]+ \| \+([\d.]+)% \| \+([\d.]+)% \|"
            for name in ("int4", "gptq", "awq")
        ),
        lambda manual, novel, gptq_manual, gptq_novel, awq_manual, awq_novel: (
            0.4 < gptq_manual / manual < 0.78
            and 0.4 < gptq_novel / novel < 0.78
            and awq_manual < gptq_manual
            and awq_novel < gptq_novel
        ),
    ),
    Statement(
        "09",
        "On the manual it does about as well, and on the novel it loses",
        (
            r"\| 3 bits, gptq \| [\d.]+ \| \+([\d.]+)% \| \+([\d.]+)% \|",
            r"\| 3 bits, gptq, python only \| [\d.]+ \| \+([\d.]+)% \| \+([\d.]+)% \|",
        ),
        lambda manual, novel, manual_only, novel_too: (
            0.8 < manual_only / manual < 1.25 and novel_too > 2 * novel
        ),
    ),
    Statement(
        "10",
        "No bytes, and no time beyond the noise of the machine.",
        (r"dense +([\d.]+) MB, +([\d.]+) ms", r"half zeros +([\d.]+) MB, +([\d.]+) ms"),
        lambda dense, took, zeros, took_too: zeros == dense and 0.85 < took_too / took < 1.15,
    ),
    Statement(
        "10",
        "Scores that know the inputs remove more for less",
        (r"by \|w\| +error at 2:4: ([\d.]+)%", r"by \|w\| · ‖x‖ +error at 2:4: ([\d.]+)%"),
        lambda magnitude, wanda: wanda < magnitude,
    ),
    Statement(
        "10",
        "**Here it saves memory and costs time.**",
        (
            r"dense +([\d.]+) MB, gate_up of all layers +([\d.]+) ms",
            r"wanda +([\d.]+) MB, gate_up of all layers +([\d.]+) ms",
        ),
        lambda dense, took, sparse, took_too: sparse < dense and took_too > 1.2 * took,
    ),
    Statement(
        "10",
        "on its own they lose next to nothing.",
        (
            r"\| float32 \| 1.00 \| ([\d,]+) \| ([\d,]+) \|",
            r"\| int4, the file's own \| [\d.]+ \| ([\d,]+) \| ([\d,]+) \|",
        ),
        lambda python, austen, python_int4, austen_int4: (
            python_int4 < 1.07 * python and austen_int4 < 1.07 * austen
        ),
    ),
    Statement(
        "10",
        "**The verdict: the rival did it, and the quality is the witness.**",
        (
            r"\| 2:4 of 8 bits, repaired \| \d+ \| ([\d.]+) × \| (\d+) \|",
            r"\| 4 bits, all weights \| \d+ \| ([\d.]+) × \| (\d+) \|",
        ),
        lambda sparse_speed, sparse, rival_speed, rival: (
            rival_speed >= sparse_speed and rival < 0.8 * sparse
        ),
    ),
    Statement(
        "10",
        "Per byte, 8 bits for all weights lose far less than half of the weights gone",
        (
            r"\| float32 \| ([\d.]+) \| (\d+) \|",
            r"\| int8 \| ([\d.]+) \| (\d+) \|",
            r"\| 2:4, wanda, recovered \| ([\d.]+) \| (\d+) \|",
        ),
        lambda one, dense, small, int8, half, sparse: (
            small < half < one and int8 - dense < 0.2 * (sparse - dense)
        ),
    ),
    Statement(
        "11",
        "the tokens that make no sense here have most of the probability",
        (r"τ = +3: .* at τ = 1 ([\d.]+)%",),
        lambda share: share > 50,
    ),
    Statement(
        "11",
        "The other one is far surer, and of the wrong tokens.",
        (r"\| student \| ([\d.]+) \| ([\d.]+)", r"\| p and q exchanged \| ([\d.]+) \| ([\d.]+)"),
        lambda doubt, apart, doubt_too, apart_too: doubt_too < 0.7 * doubt and apart_too > apart,
    ),
    Statement(
        "11",
        "for the same compute it took more than twice as many",
        (r"\| the teacher's text \| (\d+) \|", r"\| the teacher's text, soft targets \| (\d+) \|"),
        lambda alone, soft: alone > 2 * soft,
    ),
    Statement(
        "11",
        "so fewer of all guesses are kept than α says",
        (r"four guesses at a time: (\d+)% of all guesses are kept", r"a chance of α = ([\d.]+)"),
        lambda kept, alpha: kept < 100 * alpha,
    ),
    Statement(
        "11",
        "it is right nearly half of the time, for a third of the bytes",
        (
            r"your guess \d+%, predicted (\d+)%, measured",
            r"\| packaged student \| [\d.]+ million \| [\d.]+ \| [\d.]+ \| (\d+)%",
        ),
        lambda of_bytes, right: 40 <= right < 50 and 28 < of_bytes < 38,
    ),
    Statement(
        "11",
        "A student with 4 of 30 layers reads a third of the bytes",
        (r"your guess \d+%, predicted (\d+)%, measured",),
        lambda predicted: 28 < predicted < 38,
    ),
    Statement(
        "12",
        "four cost far less than four times as much as one",
        (r"(?m)^1 tokens: +([\d.]+) ms", r"(?m)^4 tokens: +([\d.]+) ms"),
        lambda one, four: four < 2.5 * one,
    ),
    Statement(
        "12",
        "even with guesses, the float32 target stays behind plain decoding in int4",
        (
            r"\| float32, prepacked (?:\| [\d.]+ ){7}\| (\d+) \|",
            r"\| int4 (?:\| [\d.]+ ){6}\| (\d+) \|",
        ),
        lambda guessing, plain: guessing < plain,
    ),
    Statement(
        "12",
        "The student was trained mostly on chat, and that is where it is right.",
        (
            r"\| chat \| student \| ([\d.]+)",
            r"\| copying \| student \| ([\d.]+)",
            r"\| prose \| student \| ([\d.]+)",
        ),
        lambda chat, copying, prose: chat > 1.2 * max(copying, prose),
    ),
    Statement(
        "12",
        "With a target in 8 or 4 bits less is left of both",
        (
            r"\| float32, prepacked (?:\| [\d.]+ ){5}\| ([\d.]+) \|",
            r"\| bfloat16 (?:\| [\d.]+ ){5}\| ([\d.]+) \|",
            r"\| int8 (?:\| [\d.]+ ){5}\| ([\d.]+) \|",
            r"\| int4 (?:\| [\d.]+ ){5}\| ([\d.]+) \|",
        ),
        lambda float32, bfloat16, int8, int4: min(float32, bfloat16) > int8 > int4,
    ),
    Statement(
        "12",
        "The prediction falls as well, but later, and is too hopeful where few requests run",
        (
            r"(?m)^\| 1 \| ([\d.]+) \| ([\d.]+) \|",
            r"(?m)^\| 4 \| ([\d.]+) \| ([\d.]+) \|",
            r"(?m)^\| 16 \| ([\d.]+) \| ([\d.]+) \|",
        ),
        lambda said_1, found_1, said_4, found_4, said_16, found_16: (
            said_4 > said_16
            and found_1 > found_4 > found_16
            and said_1 > found_1
            and said_4 > found_4
        ),
    ),
    Statement(
        "12",
        "and its own trials cost something, but it makes a large loss small.",
        (
            r"(?m)^\| 4 \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|",
            r"(?m)^\| 16 \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|",
        ),
        lambda always_4, brake_4, always_16, brake_16: (
            (always_4 >= 1 or 0.85 < brake_4 < 1.05)
            and (always_16 >= 1 or max(0.85, always_16) < brake_16 < 1.05)
        ),
    ),
    Statement(
        "13",
        "They shrink with the micro-batches, and never vanish.",
        (
            r"(?m)^\| 1 \| \d+% \| (\d+)% \|",
            r"(?m)^\| 2 \| \d+% \| (\d+)% \|",
            r"(?m)^\| 4 \| \d+% \| (\d+)% \|",
            r"(?m)^\| 8 \| \d+% \| (\d+)% \|",
        ),
        lambda one, two, four, eight: one > two > four > eight > 0,
    ),
    Statement(
        "13",
        "So the whole gains nothing any more, and may even take longer, though the bubble is",
        (
            r"(?m)^\| 4 \| \d+% \| (\d+)% \| (\d+) \|",
            r"(?m)^\| 8 \| \d+% \| (\d+)% \| (\d+) \|",
        ),
        lambda idle_4, whole_4, idle_8, whole_8: idle_8 < idle_4 and whole_8 > 0.95 * whole_4,
    ),
    Statement(
        "13",
        "On a quiet machine two groups of four do more than one",
        (r"1 × 4 requests: +(\d+) tokens/s", r"2 × 4 requests: +(\d+) tokens/s"),
        lambda one, two: two > one,
    ),
    Statement(
        "13",
        "But so does one group of eight, with half of the ranks idle!",
        (r"1 × 4 requests: +(\d+) tokens/s", r"1 × 8 requests: +(\d+) tokens/s"),
        lambda four, eight: eight > four,
    ),
    Statement(
        "13",
        "So two stages of four slices give more tokens per second than eight slices",
        (
            r"\| 8 \| 1 \| 1 \| \d+ \| [\d.]+ \| [\d.]+ \| ([\d,]+) \| ([\d,]+) \|",
            r"\| 4 \| 2 \| 1 \| \d+ \| [\d.]+ \| [\d.]+ \| ([\d,]+) \| ([\d,]+) \|",
        ),
        lambda slices, slices_pcie, stages, stages_pcie: (
            stages > slices and stages_pcie > slices_pcie
        ),
    ),
    Statement(
        "14",
        "a step no longer waits for them, and fewer bits gain next to nothing, or even lose",
        (r"\| 4 bits, many \| ([\d.]+) ×", r"Alone, over .*, many ([\d.]+) ×"),
        lambda both, many: both < 1.25 * many,
    ),
    Statement(
        "14",
        "the faster decoding gets, the larger is the share of the prompts",
        (
            r"\| 4 bits, prefix \| ([\d.]+) ×",
            r"\| prefix, many \| ([\d.]+) ×",
            r"float32: 4 bits ([\d.]+) ×, many ([\d.]+) ×, prefix ([\d.]+) ×",
        ),
        lambda with_bits, with_many, bits, many, prefix: (
            with_bits / bits > prefix and with_many / many > prefix
        ),
    ),
    Statement(
        "14",
        "Two techniques that save different parts of the time help each other",
        (
            r"\| 4 bits, prefix \| .* \| \*\*([\d.]+)\*\*",
            r"\| prefix, many \| .* \| \*\*([\d.]+)\*\*",
        ),
        lambda bits, many: bits > 1.05 and many > 1.05,
    ),
    Statement(
        "14",
        "two that save the same part fight",
        (
            r"\| 4 bits, many \| .* \| \*\*([\d.]+)\*\*",
            r"\| many, guesses \| .* \| \*\*([\d.]+)\*\*",
        ),
        lambda bits, guesses: bits < 0.9 and guesses < 0.9,
    ),
    Statement(
        "14",
        "So its number is larger, even on one machine.",
        (r"the server says \*\*(\d+) ms\*\*, the client \*\*(\d+) ms\*\*",),
        lambda server, client: server <= client < 1.5 * server,
    ),
    Statement(
        "14",
        "the system prompt that all share lies in blocks that are read once for all",
        (r"\| minillm \| ([\d,]+) \| ([\d,]+)", r"\| llama\.cpp \| ([\d,]+) \| ([\d,]+)"),
        lambda ours, ours_p99, theirs, theirs_p99: ours < theirs and ours_p99 < theirs_p99,
    ),
    Statement(
        "14",
        "with a budget that is too large it is no longer than a healthy server's",
        (
            r"\| TTFT p50 \(ms\) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|",
            r"\| TTFT p99 \(ms\) \| [\d,]+ \| [\d,]+ \| ([\d,]+) \| ([\d,]+) \|",
        ),
        lambda blocks, places, budget, healthy, budget_p99, healthy_p99: (
            min(blocks, places) > 2 * healthy
            and budget <= 1.05 * healthy
            and budget_p99 <= 1.05 * healthy_p99
        ),
    ),
    Statement(
        "15",
        "At these prices the cheap chips are not cheap for what they do.",
        (
            r"\| t4 \| .* \| (\d+) \| (\d+) \|",
            r"\| l4 \| .* \| (\d+) \| (\d+) \|",
            r"\| a100-80gb \| .* \| (\d+) \| (\d+) \|",
            r"\| h100 \| .* \| (\d+) \| (\d+) \|",
            r"\| h200 \| .* \| (\d+) \| (\d+) \|",
        ),
        lambda t4, t4_flops, l4, l4_flops, a100, a100_flops, h100, h100_flops, h200, h200_flops: (
            max(t4, l4) < min(a100, h100, h200)
            and max(t4_flops, l4_flops) <= min(a100_flops, h100_flops, h200_flops)
        ),
    ),
    Statement(
        "15",
        "A token gets cheaper as the load grows",
        (
            r"(?m)^\| 1 \| \d+ × .* \| ([\d.]+) \|$",
            r"(?m)^\| 4 \| \d+ × .* \| ([\d.]+) \|$",
            r"(?m)^\| 10 \| \d+ × .* \| ([\d.]+) \|$",
            r"(?m)^\| 30 \| \d+ × .* \| ([\d.]+) \|$",
        ),
        lambda at_1, at_4, at_10, at_30: at_1 > at_4 > at_10 > at_30,
    ),
    Statement(
        "15",
        "Once it is full, twice the load takes twice the chips.",
        (
            r"(?m)^\| 30 \| \d+ × .* \| ([\d.]+) \| [\d.]+ \|$",
            r"(?m)^\| 60 \| \d+ × .* \| ([\d.]+) \| [\d.]+ \|$",
        ),
        lambda at_30, at_60: 1.8 < at_60 / at_30 < 2.2,
    ),
]
