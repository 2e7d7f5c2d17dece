// Keeps an open page up to date, as long as it is one of something that goes on.
"use strict";
const main = document.querySelector("main");
let shown = "";
async function renew() {
  try {
    // Whoever types into the filter is not disturbed.
    if (main.querySelector("input[type=search]:focus")) { return watch(); }
    const answer = await fetch(location.href, {cache: "no-store"});
    const text = await answer.text();
    if (answer.ok && text !== shown) {
      const open = [...main.querySelectorAll("details")].map((part) => part.open);
      const boxes = [...main.querySelectorAll(".scroll")].map((box) => box.scrollTop);
      const chosen = [...main.querySelectorAll("input:checked")].map((box) => box.value);
      const page = new DOMParser().parseFromString(text, "text/html");
      main.replaceChildren(...page.querySelector("main").childNodes);
      main.querySelectorAll("details").forEach((part, k) => { part.open = open[k] || false; });
      main.querySelectorAll(".scroll").forEach((box, k) => { box.scrollTop = boxes[k] || 0; });
      main.querySelectorAll("[name=run]").forEach((box) => { box.checked = chosen.includes(box.value); });
      shown = text;
    }
  } catch (error) {
    console.debug("no answer: " + error);
  }
  watch();
}
function watch() {
  if (main.querySelector("[data-live]")) { setTimeout(renew, 2000); }
}
watch();
