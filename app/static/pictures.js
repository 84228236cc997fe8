// Images: the wheel zooms at the pointer, dragging moves, a click or "fit" resets. Also the copy button.
"use strict";

(() => {
  const MOST = 24, STEP = 1.0015, MOVED_PX = 4;
  let pointed = null, drag = null, dragged = false;

  // The wheel zooms the picture that the pointer was moved onto, not one that was scrolled under it.
  addEventListener("pointermove", event => {
    pointed = event.target.closest ? event.target.closest(".v-zoom") : null;
    if (drag) pan(event);
  });
  addEventListener("scroll", event => {
    if (event.target === document) pointed = null;
  }, {capture: true, passive: true});

  addEventListener("wheel", event => {
    const box = event.target.closest && event.target.closest(".v-zoom");
    if (!box || box !== pointed && !event.ctrlKey) return;
    const frame = box.querySelector(".v-frame"), before = scale(box);
    if (before === 1 && event.deltaY > 0 && !event.ctrlKey) return;  // the page scrolls
    event.preventDefault();
    const after = Math.min(MOST, Math.max(1, before * STEP ** -event.deltaY));
    if (after < 1.02) return fit(box);
    const frameBox = frame.getBoundingClientRect(), outer = box.getBoundingClientRect();
    const x = (event.clientX - frameBox.left) / frameBox.width, y = (event.clientY - frameBox.top) / frameBox.height;
    if (!box.dataset.scale) begin(box, outer);
    box.dataset.scale = after;
    frame.style.width = `${after * 100}%`;
    const now = frame.getBoundingClientRect();
    box.scrollLeft += now.left + x * now.width - event.clientX;
    box.scrollTop += now.top + y * now.height - event.clientY;
  }, {passive: false});

  const scale = box => parseFloat(box.dataset.scale || 1);

  function begin(box, outer) {
    box.style.height = `${outer.height}px`;  // only the content grows, so the layout does not shift
    box.classList.add("v-scaled-by-wheel");
    const button = document.createElement("button");
    Object.assign(button, {type: "button", className: "v-tool v-fit", textContent: "fit", title: "the whole picture"});
    box.after(button);
  }

  function fit(box) {
    delete box.dataset.scale;
    box.classList.remove("v-scaled-by-wheel");
    box.style.height = box.querySelector(".v-frame").style.width = "";
    box.scrollLeft = box.scrollTop = 0;
    const button = box.parentElement.querySelector(".v-fit");
    if (button) button.remove();
  }

  addEventListener("pointerdown", event => {
    const box = event.target.closest && event.target.closest(".v-zoom");
    dragged = false;
    if (box && event.button === 0 && (box.dataset.scale || box.querySelector(".v-zoomed").checked)) {
      drag = {box, x: event.clientX, y: event.clientY, left: box.scrollLeft, top: box.scrollTop};
    }
  });

  function pan(event) {
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (Math.hypot(dx, dy) > MOVED_PX) dragged = true;
    drag.box.scrollLeft = drag.left - dx;
    drag.box.scrollTop = drag.top - dy;
  }
  for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, () => { drag = null; });

  addEventListener("click", event => {
    const target = event.target.closest ? event.target : null, box = target && target.closest(".v-zoom");
    if (box && dragged) event.preventDefault();  // it was moved, not clicked
    else if (box && box.dataset.scale && target.matches(":not(input)")) fit(box), event.preventDefault();
    else if (target && target.matches(".v-fit")) fit(target.parentElement.querySelector(".v-zoom"));
    else if (target && target.closest(".v-copy")) copy(target.closest(".v-copy"));
  }, true);

  async function copy(button) {
    const text = button.dataset.copy, said = button.parentElement.querySelector("[role=status]");
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // over plain HTTP from another machine, or not allowed
      const field = document.createElement("textarea");
      field.value = text;
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    said.textContent = "copied";
    setTimeout(() => { said.textContent = ""; }, 2000);
  }
})();
