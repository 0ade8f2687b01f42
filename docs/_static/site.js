// The theme's toggles of the side bar show an arrow alone: name each after its link.
document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll("li.has-children > details > summary")) {
    const link = summary.closest("li").querySelector("a");
    summary.setAttribute("aria-label", `Pages of ${link.textContent.trim()}`);
  }
});
