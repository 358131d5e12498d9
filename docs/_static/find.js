// The page of DeepSpeed's names gets a box above its tables: it keeps the rows that have a word, and marks the names.
document.addEventListener("DOMContentLoaded", () => {
  const page = document.getElementById("what-of-deepspeed-works-here");
  if (!page) return;
  const box = document.createElement("input");
  Object.assign(box, { type: "search", placeholder: "find a name or a key", size: 40 });
  box.setAttribute("aria-label", "find a name or a key");
  box.addEventListener("input", () => {
    const word = box.value.trim().toLowerCase();
    const has = (part) => part.textContent.toLowerCase().includes(word);
    for (const row of page.querySelectorAll("tbody tr")) {
      row.hidden = !has(row);
      for (const name of row.querySelectorAll("code")) name.style.background = word && has(name) ? "#ffe08a" : "";
    }
  });
  page.querySelector("section").before(box);
});
