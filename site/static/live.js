// Live elements, films of steps, exercises and guesses. Python starts with the first question.
const folder = new URL("./", document.currentScript.src).href;

// Python

class Python {
  constructor() {
    this.waiting = new Map();
    this.last = 0;
  }

  get worker() {
    if (!this.running) {
      this.running = new Worker(folder + "worker.js", { type: "module" });
      this.ready = new Promise((resolve, reject) => {
        this.running.onmessage = ({ data }) => {
          if (data.ready) return resolve();
          if (data.broken) return reject(new Error(data.broken));
          const question = this.waiting.get(data.id);
          if (!question) return;
          if (data.html !== undefined) question.picture(data.html);
          if (data.done) {
            this.waiting.delete(data.id);
            question.resolve(data);
          }
        };
        this.running.onerror = (event) => reject(new Error(event.message || "no worker"));
      });
    }
    return this.running;
  }

  // Ask; `picture` is called with each picture, and the promise holds the last message.
  ask(question, picture = () => {}) {
    const id = ++this.last;
    const answer = new Promise((resolve) => this.waiting.set(id, { picture, resolve }));
    this.worker.postMessage({ id, ...question });
    return this.ready.then(() => answer);
  }

  // End whatever runs. The next question starts Python anew.
  end() {
    this.running?.terminate();
    this.running = null;
    for (const { resolve } of this.waiting.values()) resolve({ done: true, ended: true });
    this.waiting.clear();
  }
}

const python = new Python();

// Live elements

function live(element) {
  const form = element.querySelector("form");
  const picture = element.querySelector(".picture");
  const state = element.querySelector(".state");
  const go = form.querySelector(".go");
  const written = form.querySelectorAll("input[type=text]");
  let busy = false, again = false, drawn = 0;

  function values() {
    const found = {};
    for (const control of form.querySelectorAll("select, input")) {
      const numbers = control.dataset.values;
      found[control.name] = numbers ? JSON.parse(numbers)[control.value] : control.value;
    }
    return found;
  }

  async function ask() {
    if (busy) {
      again = true; // only the newest question is answered
      return;
    }
    busy = true;
    element.classList.add("busy");
    const width = Math.max(300, Math.min(1000, picture.clientWidth));
    const begin = performance.now();
    state.textContent = python.running ? "computing …" : "starting Python in this page …";
    drawn = width;
    try {
      const question = { element: element.dataset.element, values: values(), width };
      const { error } = await python.ask(question, (html) => {
        picture.innerHTML = html;
        films(picture);
      });
      const spent = performance.now() - begin;
      state.textContent = error ?? `computed in this page, in ${spent.toFixed(0)} ms`;
    } catch (error) {
      state.textContent = `Python does not start in this browser: ${error.message}`;
    }
    element.classList.remove("busy");
    busy = false;
    element.dataset.answered = Number(element.dataset.answered ?? 0) + 1;
    if (again) {
      again = false;
      ask();
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  form.addEventListener("input", ({ target }) => {
    const numbers = target.dataset.values;
    if (numbers) {
      const chosen = JSON.parse(numbers)[target.value];
      target.closest("label").querySelector("output").textContent = chosen.toLocaleString("en");
    }
    if (!go && target.type !== "text") ask();
  });
  written.forEach((line) => line.addEventListener("change", ask));
  go?.addEventListener("click", ask);
  form.querySelectorAll("button[data-to]").forEach((button) =>
    button.addEventListener("click", () => {
      const line = form.querySelector(`[name=${button.dataset.to}]`);
      line.value = button.dataset.write ?? line.value + button.dataset.append;
      ask();
    }));
  // A picture of another width, once the reader has asked something.
  addEventListener("resize", () => {
    if (drawn && !go && Math.abs(picture.clientWidth - drawn) > 60) ask();
  });
}

// Films: a picture whose steps are parts with data-step, and frames with data-frame

function films(place) {
  for (const film of place.querySelectorAll(".movie")) {
    const last = Number(film.dataset.frames) - 1;
    const bar = document.createElement("div");
    bar.className = "film-bar";
    bar.innerHTML = `<button type="button" class="play">▶ play</button>
      <button type="button" class="back" aria-label="a step back">‹</button>
      <button type="button" class="on" aria-label="a step on">›</button>
      <input type="range" min="0" max="${last}" value="${last}" aria-label="step">`;
    const [play, back, on, range] = bar.children;
    const steps = film.querySelectorAll("[data-step]");
    const frames = film.querySelectorAll("[data-frame]");
    let timer = null;

    function show(step) {
      range.value = step;
      steps.forEach((part) => (part.style.display = part.dataset.step <= Number(range.value) ? "" : "none"));
      frames.forEach((frame) => (frame.hidden = frame.dataset.frame !== range.value));
    }
    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "▶ play";
    }
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (Number(range.value) === last) show(0);
      play.textContent = "❚❚ pause";
      timer = setInterval(() => {
        if (!film.isConnected || Number(range.value) === last) return stop();
        show(Number(range.value) + 1);
      }, Math.max(120, Math.min(600, 12000 / (last + 1))));
    });
    back.addEventListener("click", () => (stop(), show(Math.max(0, Number(range.value) - 1))));
    on.addEventListener("click", () => (stop(), show(Math.min(last, Number(range.value) + 1))));
    range.addEventListener("input", () => (stop(), show(Number(range.value))));
    film.querySelector("svg").after(bar);
  }
}

// Exercises

const LIMIT = 60; // seconds

function exercise(element) {
  const editor = element.querySelector("textarea");
  const check = element.querySelector(".check");
  const anew = element.querySelector(".anew");
  const told = element.querySelector(".told");
  const verdict = element.querySelector(".verdict");
  const key = `minillm ${element.dataset.lesson} ${element.dataset.name}`;
  const hole = editor.value;

  function kept() {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // a browser that keeps nothing
    }
  }
  function keep() {
    try {
      if (editor.value === hole) localStorage.removeItem(key);
      else localStorage.setItem(key, editor.value);
    } catch {}
  }
  function fit() {
    editor.rows = Math.max(6, Math.min(40, editor.value.split("\n").length + 1));
  }

  editor.value = kept() ?? hole;
  fit();
  editor.addEventListener("input", () => (keep(), fit()));
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Tab" && !event.shiftKey && !event.ctrlKey && !event.altKey) {
      event.preventDefault();
      document.execCommand("insertText", false, "    ");
    }
  });
  anew.addEventListener("click", () => {
    editor.value = hole;
    keep();
    fit();
    told.hidden = true;
    verdict.textContent = "";
    element.classList.remove("passed", "failed");
  });
  check.addEventListener("click", async () => {
    check.disabled = true;
    verdict.textContent = python.running ? "running …" : "starting Python in this page …";
    element.classList.remove("passed", "failed");
    let timer;
    try {
      const slices = await (await fetch(`${folder}exercises/${element.dataset.lesson}.json`)).json();
      const { before, check: test } = slices[element.dataset.name];
      const limit = Number(element.dataset.limit ?? LIMIT);
      const begin = performance.now();
      const question = python.ask({ exercise: { before, learner: editor.value, check: test } });
      python.ready.then(() => (timer = setTimeout(() => python.end(), limit * 1000)));
      const { result, ended, error } = await question;
      const spent = ((performance.now() - begin) / 1000).toFixed(1);
      const passed = Boolean(result?.passed);
      element.classList.add(passed ? "passed" : "failed");
      verdict.textContent = passed ? `✓ passed, ${spent} s` : "not yet";
      const said = ended ? `It ran for more than ${limit} s and was ended.` : error;
      told.textContent = said ?? [result.printed, result.error].filter(Boolean).join("\n");
    } catch (error) {
      element.classList.add("failed");
      verdict.textContent = "not run";
      told.textContent = `Python does not start in this browser: ${error.message}`;
    }
    clearTimeout(timer);
    told.hidden = !told.textContent;
    check.disabled = false;
  });
}

// Guesses: what comes after is veiled until the reader has written one

function guess(element) {
  const names = element.dataset.guess.split(" ");
  const veiled = [...document.querySelectorAll(names.map((name) => `.tag_veil_${name}`).join())]
    .map((cell) => cell.querySelector(".cell_output"));
  const button = element.querySelector("button");
  const said = element.querySelector(".said");
  veiled.forEach((part) => part.classList.add("veiled", "on"));
  element.classList.add("open");
  button.addEventListener("click", () => {
    const inputs = [...element.querySelectorAll("input")];
    const guessed = inputs.map((input) => input.value.trim()).join(", ");
    veiled.forEach((part) => {
      part.classList.remove("on");
      part.dataset.said = guessed ? `You guessed ${guessed}.` : "";
    });
    said.textContent = guessed ? "Read on: the answer is no longer veiled." : "Unveiled.";
    element.classList.remove("open");
  });
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".live").forEach(live);
  films(document);
  document.querySelectorAll(".exercise").forEach(exercise);
  document.querySelectorAll(".guess").forEach(guess);
  // A click on the veil takes it away as well.
  document.querySelectorAll(".veiled").forEach((part) =>
    part.addEventListener("click", () => part.classList.remove("on")));
});
