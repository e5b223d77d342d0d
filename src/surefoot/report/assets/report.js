"use strict";
// The episode reader. Everything that a policy wrote enters the page as text, never as markup.
(() => {
  const source = document.getElementById("episodes");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const byId = (id) => document.getElementById(id);
  const unitBox = byId("unit"), episodeBox = byId("episode"), transcript = byId("transcript");
  const facts = byId("facts"), line = byId("token");
  const PROVENANCE = ["prompt", "observation", "sampled", "forced"];
  const SHADES = [0.9, 0.5, 0.1, 0.01];
  let current = null;

  const make = (tag, text, className) => {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    if (className) node.className = className;
    return node;
  };
  const round = (value) => (value === null || value === undefined ? "–" : String(Math.round(value * 1e4) / 1e4));
  const visible = (text) => (text === "" ? "▯" : text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t"));

  function option(box, text, value) {
    const node = make("option", text);
    node.value = value;
    box.append(node);
  }

  function outcome(episode) {
    if (episode.success === true) return "success";
    if (episode.success === false) return "failure";
    return episode.return === null ? "unscored" : "return " + round(episode.return);
  }

  function shade(logprob) {
    const probability = Math.exp(logprob);
    const place = SHADES.findIndex((limit) => probability >= limit);
    return place < 0 ? SHADES.length : place;
  }

  function tokens(block) {
    const box = make("div", null, "tokens");
    let sampled = 0;
    block.tokens.forEach((index, i) => {
      const [id, text] = data.vocabulary[index];
      const origin = Number(block.provenance[i]);
      const node = make("span", visible(text), "t p" + origin);
      node.dataset.id = id;
      node.dataset.origin = PROVENANCE[origin];
      if (origin === 2) {
        const logprob = block.logprobs[sampled++];
        node.dataset.logprob = logprob;
        node.classList.add("l" + shade(logprob));
      }
      box.append(node);
    });
    if (block.omitted) box.append(make("em", " … " + block.omitted.toLocaleString("en") + " more tokens left out", "note"));
    return box;
  }

  function messages(block) {
    const box = make("div", null, "messages");
    for (const message of block.messages) {
      const part = make("div", null, "message");
      part.append(make("b", message.role), make("pre", message.content));
      for (const call of message.calls) part.append(make("code", call));
      box.append(part);
    }
    return box;
  }

  function reading(block) {
    const list = make("ul", null, "reading");
    const add = (label, text, className) => {
      const item = make("li", label + " ", className);
      item.append(make("code", text));
      list.append(item);
    };
    block.calls.forEach((call) => add("call", call));
    block.malformed.forEach((text) => add("not readable", text, "bad"));
    block.results.forEach((r) => add((r.ok ? "result of " : "error of ") + r.name, r.content, r.ok ? "" : "bad"));
    if (block.finish !== "stop") list.append(make("li", "cut off: " + block.finish, "bad"));
    if (block.reward) list.append(make("li", "step reward " + round(block.reward)));
    return list.childElementCount ? list : null;
  }

  function drawTranscript(episode) {
    transcript.replaceChildren();
    for (const block of episode.blocks) {
      const part = make("section", null, "block " + block.kind);
      part.append(make("h4", block.title));
      if (block.tokens) part.append(tokens(block));
      if (block.messages) part.append(messages(block));
      const read = block.kind === "agent" ? reading(block) : null;
      if (read) part.append(read);
      transcript.append(part);
    }
    if (!episode.blocks.length) transcript.append(make("p", "This episode has no turn and no token.", "empty"));
    transcript.scrollTop = 0;
  }

  function pairs(rows) {
    const list = make("dl");
    for (const [name, value] of rows) {
      if (value === null || value === undefined || value === "") continue;
      list.append(make("dt", name), make("dd", value));
    }
    return list;
  }

  function drawFacts(episode) {
    facts.replaceChildren();
    facts.append(make("h3", "Outcome"));
    const tier = episode.trust ? " (" + episode.trust + ")" : "";
    facts.append(pairs([
      ["success", episode.success === null ? null : episode.success ? "yes" : "no"],
      ["return", episode.return === null ? null : round(episode.return) + tier],
      ["unscored", episode.unscored],
      ["advantage", episode.advantage === null ? null : round(episode.advantage)],
      ["not trained on", episode.unused],
      ["ended by", episode.stop.replace(/_/g, " ") + (episode.truncated ? " (truncated)" : "")],
      ["fault", episode.fault],
      ["reference", episode.reference],
    ]));
    facts.append(make("h3", "Rewards"));
    const list = make("ul", null, "scores");
    for (const score of episode.scores) {
      const item = make("li");
      item.append(make("b", score.name), " ");
      if (score.reason !== undefined) item.append(make("span", "unscored: " + score.reason, "bad"));
      else item.append(round(score.value) + " ", make("span", score.trust, "tier " + score.trust));
      if (score.evidence) item.append(make("span", score.evidence, "note"));
      list.append(item);
    }
    facts.append(episode.scores.length ? list : make("p", "No reward was computed.", "empty"));
    facts.append(make("h3", "Counts"));
    facts.append(pairs(Object.entries(episode.counts).map(([name, n]) => [name, n.toLocaleString("en")])));
    facts.append(make("h3", "Origin"));
    facts.append(pairs([
      ["task", episode.task], ["variant", episode.variant], ["episode", episode.id],
      ["policy version", episode.versions.join(", ")],
    ]));
  }

  function describe(node) {
    if (current) current.classList.remove("here");
    current = node;
    if (!node) { line.textContent = ""; return; }
    node.classList.add("here");
    let text = JSON.stringify(node.textContent) + " · id " + node.dataset.id + " · " + node.dataset.origin;
    if (node.dataset.logprob !== undefined) {
      const logprob = Number(node.dataset.logprob);
      text += " · log-prob " + logprob.toFixed(3) + " · p " + Math.exp(logprob).toPrecision(3);
    }
    line.textContent = text;
  }

  function drawEpisode() {
    const unit = data.units[Number(unitBox.value)];
    const episode = unit.episodes[Number(episodeBox.value)];
    describe(null);
    drawTranscript(episode);
    drawFacts(episode);
    byId("previous").disabled = episodeBox.selectedIndex === 0 && unitBox.selectedIndex === 0;
    byId("next").disabled = episodeBox.selectedIndex === unit.episodes.length - 1
      && unitBox.selectedIndex === data.units.length - 1;
  }

  function drawUnit(place) {
    const unit = data.units[Number(unitBox.value)];
    episodeBox.replaceChildren();
    unit.episodes.forEach((episode, i) => {
      option(episodeBox, (i + 1) + ". " + outcome(episode) + " · " + episode.variant + " · " + episode.task.slice(-8), i);
    });
    episodeBox.selectedIndex = place === "last" ? unit.episodes.length - 1 : 0;
    drawEpisode();
  }

  function move(by) {
    const unit = data.units[Number(unitBox.value)];
    const place = episodeBox.selectedIndex + by;
    if (place >= 0 && place < unit.episodes.length) {
      episodeBox.selectedIndex = place;
      drawEpisode();
    } else if (data.units[unitBox.selectedIndex + by]) {
      unitBox.selectedIndex += by;
      drawUnit(by < 0 ? "last" : "first");
    }
  }

  const tokenOf = (event) => (event.target.closest ? event.target.closest(".t") : null);
  transcript.addEventListener("mouseover", (event) => { const node = tokenOf(event); if (node) describe(node); });
  transcript.addEventListener("click", (event) => { const node = tokenOf(event); if (node) describe(node); });
  transcript.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...transcript.querySelectorAll(".t")];
    const place = current ? all.indexOf(current) + step : step > 0 ? 0 : all.length - 1;
    if (all[place]) {
      describe(all[place]);
      all[place].scrollIntoView({ block: "nearest" });
    }
    event.preventDefault();
  });
  unitBox.addEventListener("change", () => drawUnit("first"));
  episodeBox.addEventListener("change", drawEpisode);
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));

  data.units.forEach((unit, i) => option(unitBox, unit.label, i));
  drawUnit("first");
})();
