// Clips: a click on the timeline, a span or a frame's time seeks to it; a playhead and the boxes of tracks follow.
"use strict";

(() => {
  const tracks = new WeakMap();  // <g> -> [[seconds, x1, y1, x2, y2], ...]

  function places(group) {
    if (!tracks.has(group)) tracks.set(group, JSON.parse(group.dataset.vTrack));
    return tracks.get(group);
  }

  function show(video) {
    const clip = video.closest(".v-clip"), at = video.currentTime;
    if (!clip) return;
    const line = clip.querySelector(".v-timeline"), svg = clip.querySelector(".v-player > svg");
    if (line) line.style.setProperty("--v-at", `${Math.min(100, 100 * at / line.dataset.vSeconds)}%`);
    for (const group of svg ? svg.children : []) {
      const near = places(group).reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      group.style.display = Math.abs(near[0] - at) <= svg.dataset.vGap / 2 + 1e-3 ? "" : "none";
      for (const box of group.querySelectorAll("rect")) {
        const [, x1, y1, x2, y2] = near;
        for (const [name, value] of Object.entries({x: x1, y: y1, width: x2 - x1, height: y2 - y1})) {
          box.setAttribute(name, value);
        }
      }
    }
  }

  function play(video) {
    show(video);
    if (!video.paused && video.isConnected) requestAnimationFrame(() => play(video));
  }

  // events of media do not bubble
  for (const kind of ["play", "seeking", "seeked"]) {
    document.addEventListener(kind, event => event.target.matches("video") && play(event.target), true);
  }

  function wanted(target, event, line) {
    const own = target.closest(".v-seek, .v-bar-span"), lane = target.closest(".v-lane, .v-ticks");
    if (own) return parseFloat(own.dataset.at);
    if (!lane || !line) return NaN;
    const box = lane.getBoundingClientRect();
    return line.dataset.vSeconds * (event.clientX - box.left) / box.width;
  }

  addEventListener("click", event => {
    const clip = event.target.closest && event.target.closest(".v-clip"), video = clip && clip.querySelector("video");
    const at = video ? wanted(event.target, event, clip.querySelector(".v-timeline")) : NaN;
    if (Number.isFinite(at)) video.currentTime = Math.max(0, at);
  });
})();
