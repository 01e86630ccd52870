// The page, fetched with the key, takes this form's place.

const KEY = "jaxserve.key"; // api.js has it too
const problem = document.querySelector("#problem");

async function signIn(key) {
  problem.textContent = "";
  let response;
  try {
    response = await fetch(location.href, {
      headers: { Accept: "text/html", Authorization: `Bearer ${key}` },
    });
  } catch {
    // fetch refuses a header that is not Latin-1 in the same way as a lost connection.
    const isText = /^[\x20-\x7e]+$/.test(key);
    problem.textContent = isText ? "The server cannot be reached." : "This is not a key.";
    return;
  }
  if (!response.ok) {
    sessionStorage.removeItem(KEY);
    problem.textContent =
      response.status === 401
        ? "The server does not accept this key."
        : `The server answered with status ${response.status}.`;
    return;
  }
  sessionStorage.setItem(KEY, key);
  const page = await response.text();
  document.open();
  document.write(page);
  document.close();
}

document.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(document.querySelector("#key").value.trim());
});

const known = sessionStorage.getItem(KEY);
if (known) {
  document.body.hidden = true;
  await signIn(known);
  document.body.hidden = false;
}
