// Puts the parts together.

const THEME = "jaxserve.theme";
const SAMPLING = "jaxserve.sampling";
const get = (id) => document.getElementById(id);
const say = (text) => (get("spoken").textContent = text);

function setUpTheme() {
  const root = document.documentElement;
  const isDark = () =>
    (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const stored = localStorage.getItem(THEME);
  if (stored) root.dataset.theme = stored;
  const name = () => {
    get("theme").textContent = isDark() ? "Light" : "Dark";
    get("theme").setAttribute("aria-label", `${get("theme").textContent} theme`);
  };
  get("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem(THEME, root.dataset.theme);
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();
}

/** On a narrow screen one of the two is shown. */
function setUpViews() {
  const buttons = document.querySelectorAll("nav button");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.value;
      for (const each of buttons) each.setAttribute("aria-pressed", each === button);
    });
  }
}

function setUpSampling() {
  const form = get("sampling");
  const inputs = [...form.querySelectorAll("input, textarea")];
  const stored = JSON.parse(sessionStorage.getItem(SAMPLING) ?? "{}");
  const showRanges = () => {
    for (const output of form.querySelectorAll("output")) {
      output.value = form.elements[output.htmlFor.value].valueAsNumber.toFixed(2);
    }
  };
  for (const input of inputs) input.value = stored[input.name] ?? input.value;
  form.addEventListener("input", () => {
    const values = Object.fromEntries(inputs.map(({ name, value }) => [name, value]));
    sessionStorage.setItem(SAMPLING, JSON.stringify(values));
    showRanges();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  showRanges();
  const wide = matchMedia("(min-width: 1100px)");
  const follow = () => (form.parentElement.open = wide.matches);
  wide.addEventListener("change", follow);
  follow();
}

/** OpenAI's `tools`; null if the text is none. */
function parseTools(text) {
  try {
    const tools = JSON.parse(text.trim() || "[]");
    return Array.isArray(tools) ? tools : null;
  } catch {
    return null;
  }
}

/** What a request is to say, or null and a message where the form is wrong. */
function chosenSampling() {
  const form = get("sampling");
  const tools = parseTools(form.elements.tools.value);
  form.elements.tools.setCustomValidity(tools ? "" : "This is no list of tools in JSON.");
  if (!form.checkValidity()) {
    form.parentElement.open = true;
    form.reportValidity();
    return null;
  }
  const numbers = [...form.querySelectorAll("input")].filter(({ value }) => value);
  return {
    model: models.find(({ id }) => id === get("model").value),
    system: form.elements.system.value.trim(),
    params: {
      ...Object.fromEntries(numbers.map((input) => [input.name, input.valueAsNumber])),
      ...(tools.length && { tools }),
    },
  };
}

let models = [];

async function loadModels() {
  models = JSON.parse(await callForText("v1/models")).data;
  const names = models.map(({ id }) => new Option(id, id));
  get("model").replaceChildren(...names);
  get("model").hidden = false;
}

function showState(isUp, text) {
  const state = get("state");
  state.className = isUp ? "up" : "down";
  if (state.textContent !== text) state.textContent = text;
}

function setUpKey() {
  get("sign-out").hidden = !sessionStorage.getItem(KEY);
  get("sign-out").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.reload();
  });
}

setUpTheme();
setUpViews();
setUpSampling();
setUpKey();
const chat = new Chat(get("chat"), chosenSampling, say);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
watchEngine(get("plots"), loadModels, showState);
if (matchMedia("(pointer: fine)").matches) chat.message.focus();
